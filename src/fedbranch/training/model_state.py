"""A model's parameters and buffers as two flat vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbranch.types import Vector

__all__ = ["ModelState", "as_real", "trainable"]


@dataclass(frozen=True, eq=False)
class ModelState:
    """All numbers of a model that training changes, as two flat vectors.

    Attributes
    ----------
    params
        Shape (num_params,): the trainable parameters, complex ones as pairs.
    buffers
        Shape (num_buffers,): the buffers, such as BatchNorm statistics. They are float64,
        which holds counters exactly, too.
    """

    params: Tensor
    buffers: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Copy a model's state.

        Raises
        ------
        ValueError
            If the model has no trainable parameters.
        """
        params = [as_real(p.detach()).reshape(-1) for p in trainable(model)]
        if not params:
            raise ValueError(f"{type(model).__name__} has no trainable parameters")
        buffers = [as_real(b.detach()).reshape(-1).double() for b in model.buffers()]
        no_buffers = params[0].new_zeros(0, dtype=torch.float64)
        return cls(torch.cat(params), torch.cat(buffers) if buffers else no_buffers)

    def moved_by(self, params_step: Vector, buffers_step: Vector) -> ModelState:
        """Return this state displaced by the given steps."""
        device = self.params.device
        return ModelState(
            self.params + torch.tensor(params_step, device=device),
            self.buffers + torch.tensor(buffers_step, device=device),
        )

    def minus(self, before: ModelState) -> tuple[Vector, Vector]:
        """Compute the steps from another state to this one: this state minus the other."""
        params = self.params - before.params
        # An infinity or NaN that did not change has moved by 0; subtraction would give NaN.
        moved = (self.buffers != before.buffers) & ~(self.buffers.isnan() & before.buffers.isnan())
        buffers = torch.where(moved, self.buffers - before.buffers, 0.0)
        return params.float().cpu().numpy(), buffers.float().cpu().numpy()

    def digest(self) -> str:
        """Return a SHA-256 digest of all numbers, in hexadecimal."""
        parts = (self.params.double(), self.buffers)
        content = b"".join(part.cpu().numpy().tobytes() for part in parts)
        return hashlib.sha256(content).hexdigest()

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Overwrite a model's state with this one. Buffers of whole numbers are rounded."""
        start = 0
        for param in map(as_real, trainable(model)):
            values = self.params[start : start + param.numel()]
            param.copy_(values.view_as(param))
            start += param.numel()
        start = 0
        for buffer in map(as_real, model.buffers()):
            values = self.buffers[start : start + buffer.numel()].view_as(buffer)
            buffer.copy_(values if buffer.is_floating_point() else values.round())
            start += buffer.numel()


def trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters that training changes, in the model's order."""
    return (param for param in model.parameters() if param.requires_grad)


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of complex numbers as pairs of real ones, in the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
