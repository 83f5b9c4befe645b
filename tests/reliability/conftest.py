"""The fixture with which each reliability test notes its row of the committed table."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def measured() -> Callable[[str, str], None]:
    """Return a function that notes the result of a row of the table.

    It takes the row's key in ``studies.reliability_table.ROWS`` and the result. It prints both.
    If the environment variable FEDBRANCH_RELIABILITY names a folder, it also writes them there,
    one file for each row, for ``python -m studies.reliability_table``.
    """

    def note(row: str, result: str) -> None:
        print(f"{row}: {result}")
        folder = os.environ.get("FEDBRANCH_RELIABILITY")
        if folder:
            path = Path(folder) / f"{row}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"result": result}), encoding="utf-8")

    return note
