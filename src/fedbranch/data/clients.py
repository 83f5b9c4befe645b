"""What a client holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedbranch.data.examples import Data, Examples, as_examples

__all__ = ["ClientData", "PartName"]

PartName: TypeAlias = Literal["train", "test", "validation", "held_out"]


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's data.

    Parameters
    ----------
    train
        ``(x, y)``, arrays or tensors with one row for each example; or a map-style dataset.
        Its items are such pairs, as of a ``torch.utils.data.Dataset``; or rows with two
        columns, of which one is called ``label``, as of a Hugging Face ``datasets.Dataset``.
    test
        The same, held out for evaluation.
    validation
        The same, held out for decisions: whether a split paid, and which model on the path
        is best. Without it the test examples are used for these.
    group
        Its true group, if it is known. It serves to judge the clusters, never to find them.
    joins, leaves
        The first round in which it takes part, and the first in which it no longer does.

    Notes
    -----
    Floating numbers are kept as float32 and whole-number targets as int64, which is what
    models and losses expect. Inputs of other types keep theirs. Images of Pillow become bytes
    of shape (channels, height, width).

    Examples
    --------
    >>> ClientData(train=([[0.0], [1.0]], [0, 1]), group="a").train.x.shape
    (2, 1)
    """

    train: Examples
    test: Examples | None = None
    validation: Examples | None = None
    group: str | None = None
    joins: int = 1
    leaves: int | None = None

    def __init__(
        self,
        train: Data,
        test: Data | None = None,
        *,
        validation: Data | None = None,
        group: str | None = None,
        joins: int = 1,
        leaves: int | None = None,
    ) -> None:
        if joins < 1 or (leaves is not None and leaves <= joins):
            raise ValueError(
                f"joins is {joins} and leaves {leaves}; rounds count from 1 and a client leaves "
                "after it has joined"
            )
        values = {
            "train": as_examples(train, "train"),
            "test": None if test is None else as_examples(test, "test"),
            "validation": None if validation is None else as_examples(validation, "validation"),
            "group": group,
            "joins": joins,
            "leaves": leaves,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def held_out(self) -> Examples | None:
        """The examples that decide: the validation examples, or without any the test ones."""
        return self.test if self.validation is None else self.validation

    def takes_part(self, in_round: int) -> bool:
        """Return whether the client takes part in a round."""
        return self.joins <= in_round and (self.leaves is None or in_round < self.leaves)
