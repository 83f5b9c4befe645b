"""Many models side by side: one architecture, a row of parameters for each client.

``torch.func.vmap`` turns a model's products into batched products over all clients. No
client sees another's data or parameters: every number has its own row.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from fedbranch.sim.engines.stacked.layout import pooled_first
from fedbranch.sim.engines.stacked.operations import StackedOperations
from fedbranch.training.client import mixed_precision
from fedbranch.training.hashed_random import SeededDropout
from fedbranch.training.local_training import LocalTraining, Measure, accuracy, cross_entropy
from fedbranch.training.model_state import trainable

__all__ = ["IGNORED_TARGET", "CannotStack", "Stack", "StackedModel", "is_mean_over_rows"]

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

# Measures that are the plain mean of what they give for single rows; and losses that are,
# if they have no weights.
MEANS_OVER_ROWS = (
    cross_entropy,
    accuracy,
    functional.cross_entropy,
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)
LOSSES_OVER_ROWS = (
    nn.CrossEntropyLoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
)
# Rows with this target do not count in torch's cross-entropy, which then is no mean over rows.
IGNORED_TARGET = -100


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
        Some examples, as different from each other as can be, to try it on.

    Attributes
    ----------
    can_pad_training, can_pad_measuring
        Whether rows that do not count may stand behind those that do.

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
                module.flatten_parameters = _do_nothing  # type: ignore[method-assign]  # see above
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
        self.can_pad_training = False
        self.can_pad_measuring = False
        self._lane_by_lane: set[Measure] = set()  # metrics that vmap cannot do
        try:
            self._try_out(x, y)
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
        if measure in self._lane_by_lane:
            assert counts is None, "such metrics are never padded"
            lanes = zip(outputs, y, strict=True)
            return torch.stack([torch.as_tensor(measure(*lane)) for lane in lanes])
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
        """Compare two models side by side with each by itself, and find out what may be padded.

        Raises
        ------
        CannotStack
            Whatever vmap does otherwise than the model itself.
        """
        few = max(1, len(x) - len(x) // 3)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            self._compare(x, y, len(x), is_training=True)
            self._compare(x, y, len(x), is_training=False)
            if few == len(x):
                return  # with a single row there is nothing to find out
            # A few rows cannot show that a measure is a mean over rows; that must be known.
            if is_mean_over_rows(self.training.loss):
                self.can_pad_training = self._can_pad(x, y, few, is_training=True)
            if all(map(is_mean_over_rows, self.training.measures.values())):
                self.can_pad_measuring = self._can_pad(x, y, few, is_training=False)

    def _can_pad(self, x: Tensor, y: Tensor, num_rows: int, *, is_training: bool) -> bool:
        try:
            self._compare(x, y, num_rows, is_training=is_training)
        except CannotStack:
            return False
        return True

    def _compare(self, x: Tensor, y: Tensor, num_rows: int, *, is_training: bool) -> None:
        """Run both ways, with all rows or with the last ones as padding."""
        stack = self._two_models()
        untouched = {name: param.detach().clone() for name, param in stack.params.items()}
        inputs = torch.stack([x, x.flip(0)])
        targets = torch.stack([y, y.flip(0)])
        is_padded = num_rows < len(x)
        if is_padded:
            inputs[:, num_rows:], targets[:, num_rows:] = inputs[:, :1], targets[:, :1]
        counts = torch.full((2,), num_rows, device=self.device) if is_padded else None
        seeds = torch.tensor([1, 2], device=self.device)
        self._num_dropouts = 0
        outputs = self.outputs(stack, inputs.clone(), train=is_training, seeds=seeds)
        if is_training and not is_padded:
            self.has_dropout = self._num_dropouts > 0
        if any(not torch.equal(stack.params[name], kept) for name, kept in untouched.items()):
            raise CannotStack("it changes its parameters by itself")
        loss = self.training.loss
        losses = self.means(loss, outputs, targets, counts)
        # Not all models allow a gradient in evaluation mode; cuDNN's recurrent layers do not.
        has_gradient = is_training or self.training.send_gradient
        gradients: Sequence[Tensor | None] = ()
        if has_gradient:
            gradients = torch.autograd.grad(
                losses.sum(), list(stack.params.values()), allow_unused=True
            )
        for lane in range(2):
            rows, goals = inputs[lane, :num_rows], targets[lane, :num_rows]
            alone = self._alone(stack, untouched, lane, is_training)
            dropout = SeededDropout(seeds[lane], 0)
            with dropout, mixed_precision(self.training.precision, self.device):
                theirs = alone(rows.clone())
                if not isinstance(theirs, Tensor) or len(theirs) != num_rows:
                    raise CannotStack("the model does not return one row for each example")
                their_loss = loss(theirs, goals)
            self._agree(outputs[lane, :num_rows].to(theirs.dtype), theirs, "outputs")
            self._agree(losses[lane].to(their_loss.dtype), their_loss, "losses")
            if has_gradient:
                expected = torch.autograd.grad(
                    their_loss, list(trainable(alone)), allow_unused=True
                )
                own = [g if g is None else g[lane] for g in gradients]
                self._agree_on_gradients(own, expected)
            for name, buffer in alone.named_buffers():
                self._agree(stack.buffers[name][lane], buffer, "buffers")
            if not is_training:
                self._compare_measures(outputs, targets, counts, lane, theirs.detach(), goals)

    def _compare_measures(
        self,
        outputs: Tensor,
        targets: Tensor,
        counts: Tensor | None,
        lane: int,
        theirs: Tensor,
        goals: Tensor,
    ) -> None:
        for measure in self.training.measures.values():
            with mixed_precision(self.training.precision, self.device):
                expected = torch.as_tensor(measure(theirs, goals))
            if measure not in self._lane_by_lane and measure is not self.training.loss:
                try:
                    self.means(measure, outputs.detach(), targets, counts)
                except Exception:  # whatever a user's metric does that vmap does not know
                    self._lane_by_lane.add(measure)
            found = self.means(measure, outputs.detach(), targets, counts)[lane]
            self._agree(found.to(expected.dtype), expected, "metrics")

    def _two_models(self) -> Stack:
        """Stack the model and another one, a little larger in all parameters."""
        return Stack(
            {
                name: torch.stack([p.detach(), 1.1 * p.detach()]).requires_grad_()
                for name, p in self._params.items()
            },
            {name: torch.stack([b.detach()] * 2) for name, b in self._buffers.items()},
        )

    def _alone(
        self, stack: Stack, params: Mapping[str, Tensor], lane: int, is_training: bool
    ) -> nn.Module:
        """Copy the user's own model, with the parameters of a lane and fresh buffers."""
        model = copy.deepcopy(self._original).train(is_training)
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # or cuDNN warns that copies lie apart
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name in stack.params:
                own[name].copy_(params[name][lane])
        return model

    def _agree_on_gradients(
        self, ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]
    ) -> None:
        pairs = list(zip(ours, theirs, strict=True))
        if any((our is None) != (their is None) for our, their in pairs):
            raise CannotStack("under vmap it uses other parameters")
        if any(their is not None and their.is_sparse for _, their in pairs):
            raise CannotStack("it has sparse gradients")
        both = [(our, their) for our, their in pairs if our is not None and their is not None]
        # Where a gradient vanishes, as before BatchNorm, rounding is all of it.
        largest = max((float(their.abs().nan_to_num().max()) for _, their in both), default=0.0)
        rounds_much = self.device.type == "cuda" or self.training.precision == "bf16"
        least_scale = largest if rounds_much else 1e-2 * largest
        for our, their in both:
            self._agree(our, their, "gradients", least_scale=least_scale)

    def _agree(self, ours: Tensor, theirs: Tensor, what: str, *, least_scale: float = 1e-6) -> None:
        """Raise unless two results are equal but for rounding."""
        if ours.shape == theirs.shape and ours.dtype == theirs.dtype:
            ours, theirs = ours.detach().double(), theirs.detach().double()
            scale = float(theirs.abs().nan_to_num().max()) if theirs.numel() else 0.0
            tolerance = 0.02 if self.device.type == "cuda" else 1e-3
            if self.training.precision == "bf16":
                tolerance = 0.1
            if torch.allclose(
                ours, theirs, rtol=0, atol=tolerance * max(scale, least_scale, 1e-6), equal_nan=True
            ):
                return
        raise CannotStack(f"under vmap it has other {what}")


def is_mean_over_rows(measure: Measure) -> bool:
    """Say whether a measure is known to be the plain mean of what it gives for single rows."""
    if measure in MEANS_OVER_ROWS:
        return True
    return (
        type(measure) in LOSSES_OVER_ROWS
        and getattr(measure, "reduction", None) == "mean"
        and all(getattr(measure, name, None) is None for name in ("weight", "pos_weight"))
        and getattr(measure, "ignore_index", IGNORED_TARGET) == IGNORED_TARGET
    )


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
    has_hooks = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    if has_hooks or "step" in vars(optimizer):
        raise CannotStack("its optimiser's steps are changed from outside")
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
