"""Print what the data folder holds."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fedbranch.data.sources import Holding, PartHolding

__all__ = ["print_holding", "print_holdings"]

CHECKED = {
    "embedded": "It comes with that library.",
    "published": "Every file is the published one, by its SHA-256.",
    "recorded": "Every file is as it was fetched, by its SHA-256.",
    "readable": "Every file was read to its end; there is no SHA-256 to compare it with.",
}


def print_holding(holding: Holding, console: Console) -> None:
    """Print the parts of a data set, and how its files were checked."""
    lines = [f"{holding.title} in {holding.folder or 'scikit-learn'}"]
    width = max(len(name) for name in holding.parts)
    for name, part in holding.parts.items():
        lines.append(f"  {name:{width}}  {_content(part, holding.words)}")
    if holding.checked is not None:
        lines.append(CHECKED[holding.checked])
    console.print(Text("\n".join(lines)), soft_wrap=True)


def print_holdings(holdings: Sequence[Holding], console: Console) -> None:
    """Print which data sets the folder holds."""
    width = max(len(holding.name) for holding in holdings)
    lines = [f"{holding.name:{width}}  {_files(holding)}" for holding in holdings]
    lines.append("`fedbranch data NAME` fetches what is missing and checks what is there.")
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _content(part: PartHolding, words: tuple[str, str]) -> str:
    row_word, class_word = words
    rows = f"{part.rows:,}"
    if part.published_rows not in (None, part.rows):
        rows += f" of {part.published_rows:,}"
    size = f", {_megabytes(part.num_bytes)}" if part.num_bytes else ""
    return f"{rows} {row_word}, {part.classes} {class_word}{size}"


def _files(holding: Holding) -> str:
    if holding.folder is None:
        return "in scikit-learn"
    if not holding.num_bytes:
        return f"not in {holding.folder}"
    incomplete = f", without {', '.join(holding.missing)}" if holding.missing else ""
    return f"{_megabytes(holding.num_bytes)} in {holding.folder}{incomplete}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
