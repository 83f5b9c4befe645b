"""Names with numbers in them, sorted."""

from fedbranch.report.facts.natural_order import natural_order


def test_names_are_sorted_as_people_sort_them():
    assert sorted(["c10", "10", "c9", "9", "c"], key=natural_order) == ["9", "10", "c", "c9", "c10"]
