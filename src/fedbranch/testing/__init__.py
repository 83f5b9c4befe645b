"""Checks that an engine, an edge cache, a rule or a driver keeps its contract.

Each check takes the thing, or a function that makes it, and runs it through its contract. The
first clause that does not hold raises an AssertionError with the clause, the values and what to
do. The checks work in any test runner; they are also run on everything that fedbranch ships.

A name is loaded when it is first used: engines and drivers need PyTorch, fakes of Flower need
Flower.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedbranch.flower.testing import FakeGrid, FakeNode
    from fedbranch.testing.drivers import Driver, check_driver, plain_loop
    from fedbranch.testing.edge_caches import check_edge_cache
    from fedbranch.testing.engines import check_engine
    from fedbranch.testing.rules import check_rule
    from fedbranch.testing.tiny_clients import TinyClients

__all__ = [
    "Driver",
    "FakeGrid",
    "FakeNode",
    "TinyClients",
    "check_driver",
    "check_edge_cache",
    "check_engine",
    "check_rule",
    "plain_loop",
]

_MODULE_OF = {
    "Driver": "fedbranch.testing.drivers",
    "FakeGrid": "fedbranch.flower.testing",
    "FakeNode": "fedbranch.flower.testing",
    "TinyClients": "fedbranch.testing.tiny_clients",
    "check_driver": "fedbranch.testing.drivers",
    "check_edge_cache": "fedbranch.testing.edge_caches",
    "check_engine": "fedbranch.testing.engines",
    "check_rule": "fedbranch.testing.rules",
    "plain_loop": "fedbranch.testing.drivers",
}


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'fedbranch.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
