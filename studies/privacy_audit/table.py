"""The leak table, for the documentation and for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from studies.privacy_audit.measures import FLOAT32_LIMIT_DB, Measured, Word
from studies.privacy_audit.results import Results
from studies.privacy_audit.views import View

__all__ = ["END", "START", "markdown", "print_results", "with_table"]

START = "<!-- leak table -->"
END = "<!-- end of leak table -->"

TITLES: dict[View, str] = {
    "none": "none",
    "permutation": "permutation",
    "rotation": "rotation",
    "collusion": "colluding client",
    "signs": "control: signs + cosines",
}
STYLES: dict[Word, str] = {"all": "bold red", "leaks": "red", "hints": "yellow", "chance": "green"}
SHORT_TITLES: dict[View, str] = {
    "none": "none",
    "permutation": "permuted",
    "rotation": "rotated",
    "collusion": "collusion",
    "signs": "control",
}
GOALS = {
    "image": "Images, dB",
    "label": "Labels, %",
    "record": "Which candidate, %",
    "client": "Which client, %",
    "words": "Words, %",
}


def markdown(results: Results) -> str:
    """Render the results as a Markdown table.

    Returns
    -------
    str
        The table with a line end, as it is between :data:`START` and :data:`END` in
        docs/privacy.md.
    """
    heads = ["attack", "what it tries", "server also knows", "guess", *TITLES.values()]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for attack, by_view in results.rows:
        any_measured = by_view["none"]
        cells = [
            attack.title,
            f"{attack.goal}: {attack.tries}",
            attack.knows or "nothing",
            _number(any_measured.chance, any_measured),
            *(_cell(by_view[view]) for view in TITLES),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, results: Results) -> str:
    """Replace the text between :data:`START` and :data:`END` of a page by the table.

    Raises
    ------
    ValueError
        If one of the two marks is missing.
    """
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page has no place between {START} and {END} for the table")
    return f"{before}{START}\n{markdown(results)}{END}{after}"


def _cell(measured: Measured) -> str:
    word = measured.word if measured.word == "chance" else f"**{measured.word}**"
    number = _number(measured.value, measured)
    if measured.unit == "dB":
        return f"{word}, {number}"
    return f"{word}, {number} ({100 * measured.low:.0f}–{100 * measured.high:.0f})"


def _number(value: float, measured: Measured) -> str:
    if measured.unit == "dB":
        return f"≥ {FLOAT32_LIMIT_DB:.0f} dB" if value >= FLOAT32_LIMIT_DB else f"{value:.1f} dB"
    return f"{100 * value:.3g} %"


def print_results(results: Results, console: Console) -> None:
    """Print the table, grouped by goal, and the meaning of its words."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    table.add_column("attack, and what the server also knows", ratio=1)
    table.add_column("guess", justify="right", no_wrap=True)
    for title in SHORT_TITLES.values():
        table.add_column(title, justify="right", no_wrap=True)
    for goal, title in GOALS.items():
        rows = [(attack, by_view) for attack, by_view in results.rows if attack.goal == goal]
        if rows:
            table.add_row(Text(title, "bold"))
        for attack, by_view in rows:
            name = Text(attack.title)
            name.append(f"\n  {attack.knows or 'nothing'}", "dim")
            cells = [_two_lines(by_view[view]) for view in SHORT_TITLES]
            table.add_row(name, _short(by_view["none"].chance, by_view["none"]), *cells)
        if rows:
            table.add_section()
    console.print(table)
    console.print(
        Text(
            "guess: without looking at any update; of images, their mean.  "
            "all: at least 60 dB or 99 %.  leaks: better than the guess, with 99 % confidence.  "
            "hints: better, but by less than 1 dB or a factor of 2.  chance: not better.\n"
            "collusion: one client gave the server the secret of a rotation.  "
            "control: secret signs and a cosine transform alone, which is not offered.",
            "dim",
        )
    )


def _two_lines(measured: Measured) -> Text:
    text = Text(_short(measured.value, measured), STYLES[measured.word])
    return text.append(f"\n{measured.word}")


def _short(value: float, measured: Measured) -> str:
    """Format a number without its unit, which the heading has."""
    return f"{value:.1f}" if measured.unit == "dB" else f"{100 * value:.3g}"
