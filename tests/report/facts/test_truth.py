"""Clusters beside the true groups."""

from fedbranch.report.facts.run import read_run
from fedbranch.report.facts.truth import adjusted_rand_index, truth
from fedbranch.runs import RunFolder
from report.folders import about, played, split, split_run


def truth_of(folder):
    return truth(read_run(folder))


def test_without_known_groups_there_is_no_index():
    assert adjusted_rand_index({}, {"a": 1}) is None
    assert adjusted_rand_index({"a": "x"}, {}) is None


def test_clusters_are_compared_with_the_true_groups(tmp_path):
    assert truth_of(split_run(tmp_path / "small")) == run_truth()


def test_a_table_of_too_many_groups_is_left_out(tmp_path):
    run = read_run(split_run(tmp_path / "small"))  # two groups, two clusters

    assert truth(run, most_counts=4) == run_truth()
    assert truth(run, most_counts=3) == {"ari": 1.0, "groups": [], "leaves": [], "counts": []}


def run_truth():
    return {"ari": 1.0, "groups": ["x", "y"], "leaves": [1, 2], "counts": [[2, 0], [0, 2]]}


def test_clusters_that_are_nearly_right_are_not_called_exact(tmp_path):
    ids = [f"c{i}" for i in range(402)]
    groups = {i: "A" if n < 200 else "B" if n < 400 else "C" for n, i in enumerate(ids)}
    folder = RunFolder.create(tmp_path / "many", about(ids, groups=groups))
    parts = split(0, 1, _1=ids[:200], _2=ids[200:400], _3=ids[400:401], _4=ids[401:])
    sizes = {1: 200, 2: 200, 3: 1, 4: 1}
    folder.append(played(1, sizes, joined=tuple(ids), **parts))

    assert truth_of(folder)["ari"] == 0.9999  # 0.99998, to four digits 1


def test_a_client_on_the_way_down_is_in_no_cluster_of_its_own(tmp_path):
    folder = RunFolder.create(
        tmp_path / "way", about(groups=dict(zip("abcd", "xxyy", strict=True)))
    )
    folder.append(played(1, {1: 2, 2: 1}, joined=tuple("abc"), **split(0, 1, _1="ab", _2="c")))
    folder.append(played(2, {1: 2, 2: 1}, joined=("d",)))

    found = truth_of(folder)

    assert found["counts"] == [[2, 0], [0, 1]]
    assert found["ari"] == 1
