"""The leak table: in docs/privacy.md as the results say, and complete in the terminal."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from studies import privacy_audit
from studies.privacy_audit.table import END, START

PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"


def test_the_page_has_the_table_of_the_committed_results(committed):
    page = PAGE.read_text()

    # To make it so: PAGE.write_text(with_table(PAGE.read_text(), Results.load(RESULTS)))
    assert page == privacy_audit.with_table(page, committed)


def test_a_page_without_a_place_for_the_table_is_refused(committed):
    with pytest.raises(ValueError, match="no place between"):
        privacy_audit.with_table("nothing", committed)


def test_a_table_replaces_the_one_before(committed):
    page = f"before\n{START}\nan old table\n{END}\nafter"

    new = privacy_audit.with_table(page, committed)

    assert "an old table" not in new
    assert new.startswith(f"before\n{START}\n| attack |")
    assert new.endswith(f"|\n{END}\nafter")
    assert privacy_audit.with_table(new, committed) == new


def test_the_markdown_table_has_a_row_for_each_attack(committed):
    lines = privacy_audit.markdown(committed).splitlines()

    assert len(lines) == 2 + len(privacy_audit.ATTACKS)
    assert {line.count("|") for line in lines} == {10}


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_shows_all_attacks_and_no_cut_number(committed, width):
    console = Console(width=width, file=io.StringIO())

    privacy_audit.print_results(committed, console)

    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(attack.title.split(",")[0].split()[0] in text for attack in privacy_audit.ATTACKS)
