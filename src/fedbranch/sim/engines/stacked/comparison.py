"""Trying a stack out: two stacked models must compute what each of them computes alone.

A model may do things that ``vmap`` computes otherwise or not at all. So before a run, two
stacked models and each of them alone compute outputs, losses, gradients, buffers and metrics
of the same examples. The comparison also finds out which batches may be padded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbranch.data import ClientData
from fedbranch.sim.engines.stacked.model import StackedModel
from fedbranch.sim.engines.stacked.requirements import CannotStack, is_mean_over_examples
from fedbranch.sim.engines.stacked.state import StackedState
from fedbranch.training.example_tensors import example_tensors
from fedbranch.training.hashed_random import SeededDropout
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import trainable
from fedbranch.training.precision import mixed_precision

__all__ = ["example_sample", "stack_model"]

SAMPLED_CLIENTS = 8

# Two results agree if no number differs by more than this share of the largest.
TOLERANCE = 1e-3
GPU_TOLERANCE = 0.02
BF16_TOLERANCE = 0.1


def example_sample(clients: Mapping[str, ClientData], model: nn.Module) -> tuple[Tensor, Tensor]:
    """Take the first and last examples of several clients, with a little noise on the inputs.

    Equal examples, or examples of one class, would not show what a model or a loss does with
    different ones. Inputs that are not floating get no noise.
    """
    examples = [client.train for client in clients.values()]
    chosen = examples[:: -(-len(examples) // SAMPLED_CLIENTS)]
    pairs = [example_tensors(part, model) for part in chosen]
    x, y = (torch.cat([torch.cat([p[i][:2], p[i][-2:]]) for p in pairs]) for i in range(2))
    if x.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float32)
        spread = x.double().nan_to_num().std().clamp(min=0.1)
        x = x + (0.1 * spread * noise.to(x.device)).to(x.dtype)
    return x, y


def stack_model(model: nn.Module, training: LocalTraining, x: Tensor, y: Tensor) -> StackedModel:
    """Stack a model, and find out what the stack can do.

    Parameters
    ----------
    model
        Any module. It is copied.
    training
        Its loss, optimiser and precision.
    x, y
        Examples to try the stack on, as different from each other as possible.

    Raises
    ------
    CannotStack
        If stacked models do not compute the same as the model itself.
    """
    stacked = StackedModel(model, training)
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            _Comparison(stacked, model, x, y).run()
    except CannotStack:
        raise
    except Exception as error:  # any error of a user's module under vmap
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise CannotStack(f"{type(error).__name__}: {reason[:200]}") from error
    return stacked


@dataclass(frozen=True)
class _Results:
    """What two stacked models computed, and from what."""

    is_training: bool
    num_examples: int  # that count
    inputs: Tensor  # (2, num_examples and padding, ...)
    targets: Tensor
    counts: Tensor | None
    seeds: Tensor
    params: Mapping[str, Tensor]  # as they were before
    state: StackedState
    outputs: Tensor
    losses: Tensor
    gradients: Sequence[Tensor | None] | None


class _Comparison:
    def __init__(self, stacked: StackedModel, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self._stacked = stacked
        self._model = model
        self._training = stacked.training
        self._x = x
        self._y = y
        self._device = x.device

    def run(self) -> None:
        """Compare, and note at the stacked model what may be padded."""
        num_all = len(self._x)
        num_some = max(1, num_all - num_all // 3)
        self._compare(num_all, is_training=True)
        self._compare(num_all, is_training=False)
        if num_some == num_all:
            return  # a single example cannot be padded
        # A few examples cannot show that a measure is a mean over them; that must be known.
        if is_mean_over_examples(self._training.loss):
            self._stacked.can_pad_training = self._can_pad(num_some, is_training=True)
        if all(map(is_mean_over_examples, self._training.measures.values())):
            self._stacked.can_pad_measuring = self._can_pad(num_some, is_training=False)

    def _can_pad(self, num_examples: int, *, is_training: bool) -> bool:
        try:
            self._compare(num_examples, is_training=is_training)
        except CannotStack:
            return False
        return True

    def _compare(self, num_examples: int, *, is_training: bool) -> None:
        """Compare on the first examples, with padding in the place of the others."""
        results = self._together(num_examples, is_training)
        for row in range(2):
            self._compare_with_one(results, row)

    def _together(self, num_examples: int, is_training: bool) -> _Results:
        stacked, x, y = self._stacked, self._x, self._y
        state = self._two_models()
        params = {name: param.detach().clone() for name, param in state.params.items()}
        inputs, targets = torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)])
        is_padded = num_examples < len(x)
        if is_padded:
            inputs[:, num_examples:] = inputs[:, :1]
            targets[:, num_examples:] = targets[:, :1]
        counts = torch.full((2,), num_examples, device=self._device) if is_padded else None
        seeds = torch.tensor([1, 2], device=self._device)
        stacked.num_dropouts = 0
        outputs = stacked.outputs(state, inputs.clone(), train=is_training, seeds=seeds)
        if is_training and not is_padded:
            stacked.has_dropout = stacked.num_dropouts > 0
        if any(not torch.equal(state.params[name], before) for name, before in params.items()):
            raise CannotStack("it changes its parameters by itself")
        losses = stacked.means(self._training.loss, outputs, targets, counts)
        # Not all models allow a gradient in evaluation mode; cuDNN's recurrent layers do not.
        gradients: Sequence[Tensor | None] | None = None
        if is_training or self._training.send_gradient:
            gradients = torch.autograd.grad(
                losses.sum(), list(state.params.values()), allow_unused=True
            )
        return _Results(
            is_training, num_examples, inputs, targets, counts, seeds, params, state, outputs,
            losses, gradients,
        )  # fmt: skip

    def _compare_with_one(self, results: _Results, row: int) -> None:
        """Compare one of the stacked models with the same model alone."""
        num_examples = results.num_examples
        inputs = results.inputs[row, :num_examples]
        targets = results.targets[row, :num_examples]
        alone = self._alone(results, row)
        dropout = SeededDropout(results.seeds[row], 0)
        with dropout, mixed_precision(self._training.precision, self._device):
            outputs = alone(inputs.clone())
            if not isinstance(outputs, Tensor) or len(outputs) != num_examples:
                raise CannotStack("the model does not return one row for each example")
            loss = self._training.loss(outputs, targets)
        self._agree(results.outputs[row, :num_examples].to(outputs.dtype), outputs, "outputs")
        self._agree(results.losses[row].to(loss.dtype), loss, "losses")
        if results.gradients is not None:
            expected = torch.autograd.grad(loss, list(trainable(alone)), allow_unused=True)
            own = [g if g is None else g[row] for g in results.gradients]
            self._agree_on_gradients(own, expected)
        for name, buffer in alone.named_buffers():
            self._agree(results.state.buffers[name][row], buffer, "buffers")
        if not results.is_training:
            self._compare_measures(results, row, outputs.detach(), targets)

    def _compare_measures(
        self, results: _Results, row: int, outputs: Tensor, targets: Tensor
    ) -> None:
        stacked = self._stacked
        ours = results.outputs.detach()
        for measure in self._training.measures.values():
            with mixed_precision(self._training.precision, self._device):
                expected = torch.as_tensor(measure(outputs, targets))
            if measure not in stacked.unstacked_measures and measure is not self._training.loss:
                try:
                    stacked.means(measure, ours, results.targets, results.counts)
                except Exception:  # any error of a user's metric under vmap
                    stacked.unstacked_measures.add(measure)
            found = stacked.means(measure, ours, results.targets, results.counts)[row]
            self._agree(found.to(expected.dtype), expected, "metrics")

    def _two_models(self) -> StackedState:
        """Stack the model and a second one, a little larger in all parameters."""
        return StackedState(
            {
                name: torch.stack([p.detach(), 1.1 * p.detach()]).requires_grad_()
                for name, p in self._stacked.params.items()
            },
            {name: torch.stack([b.detach()] * 2) for name, b in self._stacked.buffers.items()},
        )

    def _alone(self, results: _Results, row: int) -> nn.Module:
        """Copy the user's own model, with one stacked model's parameters and fresh buffers."""
        model = copy.deepcopy(self._model).train(results.is_training)
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # or cuDNN warns that copied weights are scattered
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name, values in results.params.items():
                own[name].copy_(values[row])
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
        # A gradient that vanishes in theory, as before BatchNorm, consists of rounding only.
        largest = max((float(their.abs().nan_to_num().max()) for _, their in both), default=0.0)
        rounds_much = self._device.type == "cuda" or self._training.precision == "bf16"
        least_scale = largest if rounds_much else 1e-2 * largest
        for our, their in both:
            self._agree(our, their, "gradients", least_scale=least_scale)

    def _agree(self, ours: Tensor, theirs: Tensor, what: str, *, least_scale: float = 1e-6) -> None:
        """Raise unless two results are equal except for rounding."""
        if ours.shape == theirs.shape and ours.dtype == theirs.dtype:
            ours, theirs = ours.detach().double(), theirs.detach().double()
            scale = float(theirs.abs().nan_to_num().max()) if theirs.numel() else 0.0
            tolerance = GPU_TOLERANCE if self._device.type == "cuda" else TOLERANCE
            if self._training.precision == "bf16":
                tolerance = BF16_TOLERANCE
            if torch.allclose(
                ours, theirs, rtol=0, atol=tolerance * max(scale, least_scale, 1e-6), equal_nan=True
            ):
                return
        raise CannotStack(f"under vmap it has other {what}")
