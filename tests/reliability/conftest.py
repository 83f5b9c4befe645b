"""What the reliability tests share: every one of them states a figure for the committed table."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def measured() -> Callable[[str, str], None]:
    """Note what a row of the table came to: the row's key in ``table.ROWS``, and the result.

    It goes to the folder that the environment variable names, one file for each row, for
    ``python -m tests.reliability.table``; without that variable it is only printed.
    """

    def note(row: str, result: str) -> None:
        print(f"{row}: {result}")
        folder = os.environ.get("FEDBRANCH_RELIABILITY")
        if folder:
            path = Path(folder) / f"{row}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"result": result}), encoding="utf-8")

    return note
