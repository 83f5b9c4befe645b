"""The table of docs/reliability.md: what was tried, and what it came to.

    python -m tests.reliability.table FOLDER [--write]

prints the table of the results in a folder, where ``make test-reliability`` puts them; with
``--write`` it is put into docs/reliability.md, and the attack matrix with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"
MARKS = "<!-- {} -->\n", "<!-- end of the {} -->\n"

# Key -> what is tried.
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
    """Lay the rows out."""
    lines = ["| tried | result |", "|---|---|"]
    lines += [f"| {text} | {results[key]} |" for key, text in ROWS.items() if key in results]
    return "\n".join(lines) + "\n"


def read(folder: Path) -> dict[str, str]:
    """Read what the tests noted."""
    return {
        key: json.loads(path.read_text(encoding="utf-8"))["result"]
        for key in ROWS
        if (path := folder / f"{key}.json").exists()
    }


def main() -> None:
    """Print the table, or put it into the document."""
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
    """Put a text in place of what is between its marks."""
    begin, end = (mark.format(name) for mark in MARKS)
    before, rest = document.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


if __name__ == "__main__":
    main()
