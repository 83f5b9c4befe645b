"""Print every examination of a run in words."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from fedbranch.report.facts.examinations import VERDICTS, episodes, measured_in_words
from fedbranch.rules import Decision

__all__ = ["print_why"]


def print_why(decisions: Iterable[Decision], console: Console) -> None:
    """Print every examination, with its numbers in words.

    Of examinations in a row that ended for the same reason, the last is printed.
    """
    has_printed = False
    for episode in episodes(decisions):
        has_printed = True
        first, last = episode.decisions[0], episode.last
        when = f"round {last.round}"
        if first is not last:
            when = f"rounds {first.round} to {last.round}, the last of {len(episode.decisions)}"
        console.print(
            f"[yellow]{when}, node {last.node_id}[/yellow] "
            f"[bold]{VERDICTS[last.verdict]}[/bold]: {escape(last.reason)}",
            soft_wrap=True,
        )
        measured = measured_in_words(last)
        if measured:
            console.print(f"  [dim]{escape('; '.join(measured))}[/dim]", soft_wrap=True)
    if not has_printed:
        console.print("No cluster has been examined.")
