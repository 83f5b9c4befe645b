"""The messages and nodes that carry a model: its displacement from the initial model."""

from __future__ import annotations

from typing import TypeAlias

from fedbranch.protocol.tasks import Task, Trial
from fedbranch.tree import Node

__all__ = ["ModelSource", "memory_key"]

ModelSource: TypeAlias = Task | Trial | Node  # each has ``params`` and ``buffers``


def memory_key(source: ModelSource) -> tuple[int, int]:
    """Return the memory addresses of a source's parameters and buffers.

    While both sources exist, equal addresses mean the same model, and it needs to be prepared
    only once.
    """
    params, buffers = (
        int(vector.__array_interface__["data"][0]) for vector in (source.params, source.buffers)
    )
    return params, buffers
