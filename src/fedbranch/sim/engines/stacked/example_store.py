"""Stacked examples that are kept from round to round, while the same clients are asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from fedbranch.data import ClientData, PartName
from fedbranch.sim.engines.stacked.batches import StackedExamples

__all__ = ["ExampleStore"]


class ExampleStore:
    """Stacks clients' examples, and keeps what fits.

    Parameters
    ----------
    clients
        Client id -> data.
    model
        Its device and precision are those of the tensors.
    most_bytes
        The most memory that may be kept.
    """

    def __init__(
        self, clients: Mapping[str, ClientData], model: nn.Module, most_bytes: float
    ) -> None:
        self._clients = clients
        self._model = model
        self._most_bytes = most_bytes
        self._kept: dict[tuple[str, ...], StackedExamples] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def examples(self, ids: Sequence[str], part: PartName, purpose: str) -> StackedExamples:
        """Return clients' examples of a part of their data, one after the other.

        Parameters
        ----------
        ids, part
            Which clients, and which of their examples.
        purpose
            Names the use, for :meth:`keep_only`.
        """
        key = (purpose, *ids)
        examples = self._kept.get(key)
        if examples is None:
            examples = StackedExamples.of(
                [getattr(self._clients[i], part) for i in ids], self._model
            )
            kept_bytes = sum(other.num_bytes for other in self._kept.values())
            if kept_bytes + examples.num_bytes <= self._most_bytes:
                self._kept[key] = examples
        return examples

    def keep_only(self, purpose: str, chunks: Iterable[Sequence[str]]) -> None:
        """Drop examples of all other chunks that were stacked for this purpose."""
        asked = {(purpose, *ids) for ids in chunks}
        for key in [key for key in self._kept if key[0] == purpose and key not in asked]:
            del self._kept[key]

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
