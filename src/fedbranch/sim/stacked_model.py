"""Many models side by side: one architecture, a row of parameters for each client.

``torch.func.vmap`` turns a model's products into batched products over all clients. No
client sees another's data or parameters: every number has its own row.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedbranch.client import LocalTraining, Measure, mixed_precision, trainable
from fedbranch.randomness import SeededDropout
from fedbranch.sim.arrangement import pooled_first
from fedbranch.sim.stacked_operations import StackedOperations

__all__ = ["CannotStack", "Stack", "StackedModel"]

# Optimisers that treat every number by itself, so that a step on stacked parameters is a
# step on each client's own.
ELEMENTWISE_OPTIMIZERS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


class CannotStack(Exception):
    """Why a model or its training cannot be run for many clients at once."""


class Stack(NamedTuple):
    """The numbers of many models, by name, each with one row for each client."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


class StackedModel:
    """A model as a function of stacked parameters.

    Parameters
    ----------
    model
        Any module. It is copied.
    training
        Its loss, optimiser and precision.
    x, y
        Some examples, to try it on.

    Raises
    ------
    CannotStack
        If it does not give the same results as the model itself.
    """

    def __init__(self, model: nn.Module, training: LocalTraining, x: Tensor, y: Tensor) -> None:
        self._original = model
        self.model = pooled_first(copy.deepcopy(model))
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                # It would look for its weights' place in memory, and stacked ones have none.
                module.flatten_parameters = _do_nothing  # type: ignore[method-assign]
        self.training = training
        self.device = x.device
        self._params = {
            name: param for name, param in self.model.named_parameters() if param.requires_grad
        }
        self._buffers = dict(self.model.named_buffers())
        _check_precision(self._params, self._buffers)
        self.precision = next(iter(self._params.values())).dtype
        _check_optimizer(training, self.model)
        self.has_dropout = True
        try:
            self._try_out(x[:TRIED_ROWS], y[:TRIED_ROWS])
        except CannotStack:
            raise
        except Exception as error:  # whatever a user's module does that vmap does not know
            reason = (str(error).strip().splitlines() or [repr(error)])[0]
            raise CannotStack(f"{type(error).__name__}: {reason[:200]}") from error

    # Flat vectors and back

    def stack(self, params: Tensor, buffers: Tensor) -> Stack:
        """Cut flat rows into the model's tensors.

        Parameters
        ----------
        params, buffers
            Shape (num_clients, num_params) and (num_clients, num_buffers).
        """
        return Stack(_cut(params, self._params), _cut(buffers, self._buffers))

    @staticmethod
    def flat(tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Give stacked tensors as flat rows of the kind of another such matrix."""
        if not tensors:
            return like.new_zeros(like.shape)
        parts = [
            tensor.detach().reshape(len(tensor), -1).to(like.dtype) for tensor in tensors.values()
        ]
        return torch.cat(parts, dim=1)

    # The model

    def outputs(
        self,
        stack: Stack,
        x: Tensor,
        *,
        train: bool,
        seeds: Tensor | None = None,
        step: Tensor | int = 0,
    ) -> Tensor:
        """Run every client's model on its own inputs.

        Parameters
        ----------
        stack
            Buffers are updated in place where the model does so.
        x
            Shape (num_clients, num_rows, ...).
        train
            In training mode.
        seeds, step
            For dropout.

        Returns
        -------
        Tensor
            Shape (num_clients, num_rows, ...).
        """
        self.model.train(train)
        dropped = seeds if train and self.has_dropout else None

        def of_one(tensors: Stack, inputs: Tensor, seed: Tensor | None) -> Tensor:
            arguments = {**tensors.params, **tensors.buffers}
            with StackedOperations(is_mixed=self.training.precision == "bf16"):
                if seed is None:
                    plain: Tensor = functional_call(self.model, arguments, (inputs,))
                    return plain
                with (dropout := SeededDropout(seed, step)):
                    outputs: Tensor = functional_call(self.model, arguments, (inputs,))
                self._num_dropouts = dropout.num_calls
                return outputs

        in_dims = (0, 0, None if dropped is None else 0)
        outputs: Tensor = vmap(of_one, in_dims=in_dims, randomness="error")(stack, x, dropped)
        return outputs

    def means(self, measure: Measure, outputs: Tensor, y: Tensor, counts: Tensor | None) -> Tensor:
        """Measure every client's outputs.

        Parameters
        ----------
        measure
            A mean over rows.
        outputs, y
            Shape (num_clients, num_rows, ...).
        counts
            Shape (num_clients,): how many rows are the client's, the first ones; by default
            all.

        Returns
        -------
        Tensor
            Shape (num_clients,). Without any row it is 0.
        """
        if self.training.precision == "bf16" and outputs.is_floating_point():
            outputs = outputs.float()
        if counts is None:
            return vmap(measure)(outputs, y)
        values = self.by_row(measure, outputs, y)
        is_own = torch.arange(values.shape[1], device=values.device) < counts[:, None]
        return torch.where(is_own, values, 0).sum(dim=1) / counts.clamp(min=1)

    def by_row(self, measure: Measure, outputs: Tensor, y: Tensor) -> Tensor:
        """Measure every row by itself: shape (num_clients, num_rows)."""

        def of_row(output: Tensor, target: Tensor) -> Tensor:
            return measure(output[None], target[None])

        return vmap(vmap(of_row))(outputs, y)

    # Trying out

    def _try_out(self, x: Tensor, y: Tensor) -> None:
        """Compare with the model itself, and find out what it does with its rows."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self._num_dropouts = 0
            seeds = torch.tensor([1, 2], device=self.device)
            with torch.no_grad():
                stacked = self.outputs(
                    self._two(), torch.stack([x, x.flip(0)]), train=True, seeds=seeds
                )
                self.has_dropout = self._num_dropouts > 0
                alone = self._alone(x, seed=1)
            if not isinstance(alone, Tensor) or len(alone) != len(x):
                raise CannotStack("the model does not return one row for each example")
            if not self._close(stacked[0].to(alone.dtype), alone):
                raise CannotStack("under vmap it computes something else")
            with torch.no_grad():
                self.rows_are_independent = len(x) == 1 or (
                    self._close(alone[:1], self._alone(x[:1].expand(x.shape), seed=1)[:1])
                )
            self.measures_rows = {
                name: self._is_row_mean(measure, alone, y)
                for name, measure in self.training.measures.items()
            }
            self._try_gradient(x, y, seeds)

    def _two(self) -> Stack:
        return Stack(
            {name: torch.stack([p.detach()] * 2) for name, p in self._params.items()},
            {name: torch.stack([b.detach()] * 2) for name, b in self._buffers.items()},
        )

    def _alone(self, x: Tensor, *, seed: int) -> Tensor:
        model = copy.deepcopy(self._original).train()
        dropout = SeededDropout(torch.tensor(seed, device=self.device), 0)
        with dropout, mixed_precision(self.training.precision, self.device):
            outputs: Tensor = model(x)
        return outputs

    def _is_row_mean(self, measure: Measure, outputs: Tensor, y: Tensor) -> bool:
        with mixed_precision(self.training.precision, self.device):
            whole = measure(outputs, y)
            rows = torch.stack(
                [measure(outputs[i : i + 1], y[i : i + 1]) for i in range(len(outputs))]
            )
        return whole.shape == () and self._close(whole, rows.to(whole.dtype).mean())

    def _try_gradient(self, x: Tensor, y: Tensor, seeds: Tensor) -> None:
        stack = self._two()
        for param in stack.params.values():
            param.requires_grad_()
        outputs = self.outputs(stack, torch.stack([x, x]), train=True, seeds=seeds)
        losses = self.means(self.training.loss, outputs, torch.stack([y, y]), None)
        found = torch.autograd.grad(losses.sum(), list(stack.params.values()), allow_unused=True)
        with mixed_precision(self.training.precision, self.device):
            loss = self.training.loss(self._with_gradient(x), y)
        expected = torch.autograd.grad(loss, self._reference_params, allow_unused=True)
        pairs = list(zip(found, expected, strict=True))
        if any((ours is None) != (theirs is None) for ours, theirs in pairs):
            raise CannotStack("under vmap it uses other parameters")
        if any(theirs is not None and theirs.is_sparse for _, theirs in pairs):
            raise CannotStack("it has sparse gradients")
        # As one vector: where a gradient vanishes, as before BatchNorm, rounding is all of it.
        ours, theirs = (
            torch.cat([g.reshape(-1) for g in gradients])
            for gradients in zip(
                *((g[0], h) for g, h in pairs if g is not None and h is not None), strict=True
            )
        )
        if not self._close(ours, theirs):
            raise CannotStack("under vmap it has other gradients")

    def _close(self, ours: Tensor, theirs: Tensor) -> bool:
        """Say whether two results agree but for rounding."""
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        scale = max(float(theirs.abs().max()), 1e-6) if theirs.numel() else 1.0
        tolerance = 0.02 if self.device.type == "cuda" else 1e-3
        if self.training.precision == "bf16":
            tolerance = 0.1
        tolerance *= scale
        return torch.allclose(
            ours.double(), theirs.double(), rtol=0, atol=tolerance, equal_nan=True
        )

    def _with_gradient(self, x: Tensor) -> Tensor:
        model = copy.deepcopy(self._original).train()
        self._reference_params = list(trainable(model))
        dropout = SeededDropout(torch.tensor(1, device=self.device), 0)
        with dropout:
            outputs: Tensor = model(x)
        return outputs


TRIED_ROWS = 4


def _do_nothing() -> None:
    pass


def _check_precision(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    kinds = {str(param.dtype) for param in params.values()}
    if len(kinds) > 1 or any(t.is_complex() for t in [*params.values(), *buffers.values()]):
        raise CannotStack(f"its parameters are of several or complex kinds: {sorted(kinds)}")


def _check_optimizer(training: LocalTraining, model: nn.Module) -> None:
    params = list(trainable(model))
    optimizer = training.optimizer(params)
    if type(optimizer) not in ELEMENTWISE_OPTIMIZERS:
        raise CannotStack(f"{type(optimizer).__name__} may look at several numbers at once")
    grouped = [param for group in optimizer.param_groups for param in group["params"]]
    if len(optimizer.param_groups) > 1 or len(grouped) != len(params):
        raise CannotStack("its optimiser treats parameters differently")


def _cut(flat: Tensor, shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give every tensor its columns, in its own shape and precision."""
    pieces: dict[str, Tensor] = {}
    start = 0
    for name, tensor in shapes.items():
        piece = flat[:, start : start + tensor.numel()].reshape(len(flat), *tensor.shape)
        if not tensor.is_floating_point():
            piece = piece.round()
        pieces[name] = torch.empty_like(piece, dtype=tensor.dtype).copy_(piece)
        start += tensor.numel()
    return pieces
