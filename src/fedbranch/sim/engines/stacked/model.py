"""Many models side by side: one architecture, a row of parameters for each model.

``torch.func.vmap`` turns a model's products into batched products over all models. No client
sees another client's data or parameters, because every number has its own row.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedbranch.sim.engines.stacked.layout import pool_before_relu
from fedbranch.sim.engines.stacked.operations import StackedOperations
from fedbranch.sim.engines.stacked.requirements import check_optimizer, check_precision
from fedbranch.sim.engines.stacked.state import StackedState, unflatten
from fedbranch.training.hashed_random import SeededDropout
from fedbranch.training.local_training import LocalTraining, Measure

__all__ = ["StackedModel"]


class StackedModel:
    """A model as a function of stacked parameters.

    It is made by :func:`fedbranch.sim.engines.stacked.comparison.stack_model`, which finds out
    whether it computes the same as the model itself, and what it can do.

    Parameters
    ----------
    model
        Any module. It is copied.
    training
        Its loss, optimiser and precision.

    Attributes
    ----------
    params, buffers
        The tensors of one model, by name.
    precision
        The type of all parameters.
    has_dropout
        Whether dropout drops anything in training.
    can_pad_training, can_pad_measuring
        Whether examples that do not count may follow those that do.
    unstacked_measures
        Metrics that ``vmap`` cannot compute. They are computed for one model after the other.
    num_dropouts
        Number of dropout calls in the last forward pass that had any.

    Raises
    ------
    CannotStack
        If its parameters or its optimiser do not allow a stack.
    """

    def __init__(self, model: nn.Module, training: LocalTraining) -> None:
        self._model = pool_before_relu(copy.deepcopy(model))
        for module in self._model.modules():
            if isinstance(module, nn.RNNBase):
                # It would look up its weights' memory addresses, and stacked weights have none.
                module.flatten_parameters = _do_nothing  # type: ignore[method-assign]  # see above
        self.training = training
        self.params: dict[str, Tensor] = {
            name: param for name, param in self._model.named_parameters() if param.requires_grad
        }
        self.buffers = dict(self._model.named_buffers())
        check_precision(self.params, self.buffers)
        self.precision = next(iter(self.params.values())).dtype
        check_optimizer(training, self._model)
        self.has_dropout = True
        self.can_pad_training = False
        self.can_pad_measuring = False
        self.unstacked_measures: set[Measure] = set()
        self.num_dropouts = 0

    def state(self, params: Tensor, buffers: Tensor) -> StackedState:
        """Cut flat rows into the model's tensors.

        Parameters
        ----------
        params, buffers
            Shape (num_models, num_params) and (num_models, num_buffers).
        """
        return StackedState(unflatten(params, self.params), unflatten(buffers, self.buffers))

    def outputs(
        self,
        state: StackedState,
        x: Tensor,
        *,
        train: bool,
        seeds: Tensor | None = None,
        step: Tensor | int = 0,
    ) -> Tensor:
        """Run every model on its own inputs.

        Parameters
        ----------
        state
            Its buffers are updated in place if the model does so.
        x
            Shape (num_models, num_examples, ...).
        train
            Run in training mode.
        seeds, step
            For dropout: the models' seeds, (num_models,), and the number of the mini-batch.

        Returns
        -------
        Tensor
            Shape (num_models, num_examples, ...).
        """
        self._model.train(train)
        dropped = seeds if train and self.has_dropout else None

        def of_one(tensors: StackedState, inputs: Tensor, seed: Tensor | None) -> Tensor:
            arguments = {**tensors.params, **tensors.buffers}
            with StackedOperations(is_mixed=self.training.precision == "bf16"):
                if seed is None:
                    plain: Tensor = functional_call(self._model, arguments, (inputs,))
                    return plain
                with (dropout := SeededDropout(seed, step)):
                    outputs: Tensor = functional_call(self._model, arguments, (inputs,))
                self.num_dropouts = dropout.num_calls
                return outputs

        in_dims = (0, 0, None if dropped is None else 0)
        outputs: Tensor = vmap(of_one, in_dims=in_dims, randomness="error")(state, x, dropped)
        return outputs

    def means(self, measure: Measure, outputs: Tensor, y: Tensor, counts: Tensor | None) -> Tensor:
        """Measure every model's outputs.

        Parameters
        ----------
        measure
            A mean over examples.
        outputs, y
            Shape (num_models, num_examples, ...).
        counts
            Shape (num_models,): the number of first examples that count for each model; None
            if all count.

        Returns
        -------
        Tensor
            Shape (num_models,); 0 for a model without examples that count.
        """
        if self.training.precision == "bf16" and outputs.is_floating_point():
            outputs = outputs.float()
        if measure in self.unstacked_measures:
            assert counts is None, "such metrics are never padded"
            pairs = zip(outputs, y, strict=True)
            return torch.stack([torch.as_tensor(measure(*pair)) for pair in pairs])
        if counts is None:
            return vmap(measure)(outputs, y)
        values = _by_example(measure, outputs, y)
        is_own = torch.arange(values.shape[1], device=values.device) < counts[:, None]
        return torch.where(is_own, values, 0).sum(dim=1) / counts.clamp(min=1)


def _by_example(measure: Measure, outputs: Tensor, y: Tensor) -> Tensor:
    """Measure every example by itself: shape (num_models, num_examples)."""

    def of_one(output: Tensor, target: Tensor) -> Tensor:
        return measure(output[None], target[None])

    return vmap(vmap(of_one))(outputs, y)


def _do_nothing() -> None:
    pass
