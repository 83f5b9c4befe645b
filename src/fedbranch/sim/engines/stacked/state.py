"""The numbers of many models: as tensors by name, and as flat rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbranch.sim.engines.model_source import ModelSource, memory_key
from fedbranch.training.model_state import ModelState

__all__ = ["StackedState", "flat_states", "flatten", "unflatten"]


class StackedState(NamedTuple):
    """The numbers of many models, by name. Each tensor has one row for each model."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def of_models(self, rows: Tensor) -> StackedState:
        """Copy the numbers of the models in these rows."""
        return StackedState(
            *({name: tensor[rows] for name, tensor in tensors.items()} for tensors in self)
        )


def flat_states(initial: ModelState, sources: Sequence[ModelSource]) -> tuple[Tensor, Tensor]:
    """Return the parameters and buffers of each source's model, on the initial model's device.

    Returns
    -------
    tuple
        Shapes (num_sources, num_params) and (num_sources, num_buffers). If all sources have
        the same model, the rows share memory.
    """
    device = initial.params.device
    number_of: dict[int, int] = {}  # by the source's identity
    number_at: dict[tuple[int, int], int] = {}  # by the memory of its model
    different: list[ModelSource] = []
    for source in sources:
        if id(source) not in number_of:
            number_of[id(source)] = number_at.setdefault(memory_key(source), len(different))
            if len(number_at) > len(different):
                different.append(source)
    chosen = torch.tensor([number_of[id(source)] for source in sources], device=device)
    flat = []
    for name in ("params", "buffers"):
        moved = torch.from_numpy(np.stack([getattr(source, name) for source in different]))
        states = getattr(initial, name) + moved.to(device)
        is_one = len(different) == 1
        flat.append(states.expand(len(sources), -1) if is_one else states[chosen])
    return flat[0], flat[1]


def flatten(tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Join stacked tensors to flat rows, with the type and device of another such matrix.

    Parameters
    ----------
    tensors
        By name; one row for each model.
    like
        Shape (num_models, num_numbers).
    """
    if not tensors:
        return like.new_zeros(like.shape)
    parts = [tensor.detach().reshape(len(tensor), -1).to(like.dtype) for tensor in tensors.values()]
    return torch.cat(parts, dim=1)


def unflatten(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut flat rows into stacked tensors, with the shapes and types of one model's tensors.

    Parameters
    ----------
    flat
        Shape (num_models, num_numbers).
    like
        The tensors of one model, by name. Whole numbers are rounded.
    """
    pieces: dict[str, Tensor] = {}
    start = 0
    for name, tensor in like.items():
        piece = flat[:, start : start + tensor.numel()].reshape(len(flat), *tensor.shape)
        if not tensor.is_floating_point():
            piece = piece.round()
        pieces[name] = torch.empty_like(piece, dtype=tensor.dtype).copy_(piece)
        start += tensor.numel()
    return pieces
