"""The tables of docs/reliability.md: what was tried, and the results.

    python -m studies.reliability_table FOLDER [--write]

prints the table of the results in a folder, where ``make test-reliability`` puts them. With
``--write`` it replaces the table in docs/reliability.md, and the attack matrix below it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

__all__ = ["ROWS", "main", "put", "read", "table"]

DOCUMENT = Path(__file__).parents[1] / "docs" / "reliability.md"
MARKS = "<!-- {} -->\n", "<!-- end of the {} -->\n"

# Key of a result -> what is tried.
ROWS = {
    "kills-simulator": "SIGKILL at 20 random points of a run with splits and joins, then resumed",
    "kills-flower": "SIGKILL of a federation's server at random points, then resumed",
    "kills-checkpoint": "SIGKILL during checkpoint writes, 200 times",
    "damage": "Truncation at 64 lengths, single-bit flips at 200 offsets, missing and swapped files",
    "disk-full": "Disk full at every write call",
    "order": "Replies in shuffled order; 1 or 2 workers",
    "unreliable-clients": "30 % silent, 10 % error, 5 % late replies in each round",
    "bad-replies": "12 kinds of bad reply among 10 clients",
    "fuzz-replies": "Fuzzed replies, losses, messages and settings",
    "fuzz-files": "Fuzzed files: raw, sealed again, tensors, experiments",
    "hostile-files": "Absurd headers, path traversal in names, a million keys",
    "soak": "2,000 rounds with splits, joins and leaves",
    "signals": "SIGINT and SIGTERM at random points, with worker processes",
    "split-bomb": "Clients that send a direction of their own each, to be split apart",
    "weight-lie": "One client claims a billion examples",
    "poisoned-cache": "10 % of the cached updates poisoned, newcomers routed",
    "identity": "Forged, repeated and stolen identities",
    "threads": "200 client threads against the Flower strategy, 20 rounds",
    "attacks": "The attack matrix below",
}


def table(results: dict[str, str]) -> str:
    """Render the rows that have a result as a Markdown table."""
    lines = ["| tried | result |", "|---|---|"]
    lines += [f"| {text} | {results[key]} |" for key, text in ROWS.items() if key in results]
    return "\n".join(lines) + "\n"


def read(folder: Path) -> dict[str, str]:
    """Read the results that the tests have written, by key."""
    return {
        key: json.loads(path.read_text(encoding="utf-8"))["result"]
        for key in ROWS
        if (path := folder / f"{key}.json").exists()
    }


def main() -> None:
    """Print the table, and put it into the document if the command line says so."""
    results = read(Path(sys.argv[1]))
    text = table(results)
    print(text)
    if missing := [key for key in ROWS if key not in results]:
        sys.exit(f"no results for {', '.join(missing)}")
    if "--write" in sys.argv[2:]:
        matrix = (Path(sys.argv[1]) / "matrix.md").read_text(encoding="utf-8")
        document = DOCUMENT.read_text(encoding="utf-8")
        document = put(put(document, "table", text), "matrix", matrix)
        DOCUMENT.write_text(document, encoding="utf-8")


def put(document: str, name: str, text: str) -> str:
    """Replace the text between the marks of that name."""
    begin, end = (mark.format(name) for mark in MARKS)
    before, rest = document.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


if __name__ == "__main__":
    main()
