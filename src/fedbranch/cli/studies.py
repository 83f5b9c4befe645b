"""The studies of the repository, which are not installed with the package.

A command that runs a study finds it in a checkout. The checkout is the one that the package is
imported from (an editable install), or the one that the current folder belongs to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from fedbranch.errors import FedbranchError

__all__ = ["find_checkout", "make_importable"]


def find_checkout(starts: Iterable[Path], study: str) -> Path | None:
    """Return the first folder at or above the starts that is a checkout with the study."""
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / "studies" / study / "__init__.py").is_file() and (
                folder / "src" / "fedbranch" / "__init__.py"
            ).is_file():
                return folder
    return None


def make_importable(study: str) -> None:
    """Let ``import studies.<study>`` find the study in a checkout.

    Raises
    ------
    FedbranchError
        If there is no checkout.
    """
    checkout = find_checkout([Path(__file__).resolve().parent, Path.cwd()], study)
    if checkout is None:
        raise FedbranchError(
            f"the study {study} is part of fedbranch's repository and is not installed with the "
            "package; clone the repository, or unpack the source distribution, and call the same "
            "command in its folder"
        )
    # Nothing else puts the studies on the path: neither an editable install, which has src/
    # only, nor the fedbranch script, which has its own folder. First, so that no other package
    # named studies is taken for ours.
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
