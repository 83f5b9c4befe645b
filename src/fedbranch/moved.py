"""Import paths that the documentation of version 0.1 named: they lead to the modules of today.

Importing one warns and names the new path. Only paths that README or docs showed are here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "lead_to_new_paths"]

MOVED = {
    "fedbranch.client": "fedbranch.training.client",
    "fedbranch.core.bipartition": "fedbranch.core.linkage",
    "fedbranch.core.refine": "fedbranch.core.exact_cut",
    "fedbranch.core.sketch": "fedbranch.core.projection",
    "fedbranch.core.structure": "fedbranch.core.groups",
    "fedbranch.core.summation": "fedbranch.core.exact_sum.total",
    "fedbranch.flower.halves": "fedbranch.flower.half_updates",
    "fedbranch.halves": "fedbranch.training.half_split",
    "fedbranch.seeds": "fedbranch.training.seeds",
}


class _Moved(MetaPathFinder, Loader):
    """Finds a module under its old path."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 -- the import system passes it
        target: ModuleType | None = None,  # noqa: ARG002 -- likewise
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        warnings.warn(
            f"{old} is now {MOVED[old]}; change the import", DeprecationWarning, stacklevel=2
        )
        new = import_module(MOVED[old])
        module.__dict__.update({name: getattr(new, name) for name in (*new.__all__, "__all__")})


def lead_to_new_paths() -> None:
    """Let the old paths be imported from now on."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
