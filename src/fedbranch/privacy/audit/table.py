"""The leak table: for the documentation, and for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedbranch.privacy.audit.measures import MOST_DB, Measured, Word
from fedbranch.privacy.audit.results import Results
from fedbranch.privacy.audit.views import View

__all__ = ["END", "START", "markdown", "print_results"]

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
GOALS = {
    "image": "Images",
    "label": "Labels",
    "record": "Which candidate record",
    "client": "Which client",
    "words": "Words",
}


def markdown(results: Results) -> str:
    """Render the results as a Markdown table.

    Returns
    -------
    str
        With a line end; what stands between :data:`START` and :data:`END` in
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


def _cell(measured: Measured) -> str:
    word = measured.word if measured.word == "chance" else f"**{measured.word}**"
    number = _number(measured.value, measured)
    if measured.unit == "dB":
        return f"{word}, {number}"
    return f"{word}, {number} ({100 * measured.low:.0f}–{100 * measured.high:.0f})"


def _number(value: float, measured: Measured) -> str:
    if measured.unit == "dB":
        return f"≥ {MOST_DB:.0f} dB" if value >= MOST_DB else f"{value:.1f} dB"
    return f"{100 * value:.3g} %"


def print_results(results: Results, console: Console) -> None:
    """Print the table, by what the server is after, and what its words mean."""
    table = Table(show_lines=False)
    table.add_column("attack", min_width=20)
    table.add_column("also knows", style="dim")
    table.add_column("guess", justify="right", no_wrap=True)
    for title in TITLES.values():
        table.add_column(title, justify="right")
    for goal, title in GOALS.items():
        rows = [(attack, by_view) for attack, by_view in results.rows if attack.goal == goal]
        if not rows:
            continue
        table.add_section()
        table.add_row(Text(title, "bold"))
        for attack, by_view in rows:
            any_measured = by_view["none"]
            table.add_row(
                attack.title,
                attack.knows,
                _number(any_measured.chance, any_measured),
                *(
                    Text(
                        f"{_number(by_view[view].value, by_view[view])} {by_view[view].word}",
                        STYLES[by_view[view].word],
                    )
                    for view in TITLES
                ),
            )
    console.print(table)
    console.print(
        "Images: peak signal-to-noise ratio; the guess is the mean image. Others: share of right\n"
        "guesses. all: 60 dB or 99 % and more. leaks: above the guess beyond doubt (99 %).\n"
        "hints: so, but by less than 1 dB or a factor of 2. chance: no better than the guess.",
        style="dim",
    )
