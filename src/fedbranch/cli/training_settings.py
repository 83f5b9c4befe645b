"""The ``[model]`` and ``[training]`` tables of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedbranch.cli.data_settings import NUM_CLASSES
from fedbranch.cli.toml_settings import require

if TYPE_CHECKING:  # both load PyTorch
    from torch import nn

    from fedbranch.training.local_training import LocalTraining

__all__ = ["Model", "Training"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """``[model]``: the model that clients train."""

    name: Literal["logistic-regression", "mlp", "cnn"] = "mlp"
    hidden: tuple[int, ...] = (32,)
    channels: tuple[int, ...] = (16, 32)  # for cnn

    def __post_init__(self) -> None:
        for name in ("hidden", "channels"):
            widths = getattr(self, name)
            require(
                name,
                list(widths),
                len(widths) <= 16 and all(1 <= width <= 8192 for width in widths),
                "at most 16 widths between 1 and 8192",
            )
        if self.name == "cnn":
            require("hidden", list(self.hidden), len(self.hidden) == 1, "one width for a cnn")

    def build(self, input_shape: Sequence[int], *, seed: int) -> nn.Module:
        """Make the model."""
        from fedbranch import sim

        if self.name == "cnn":
            (hidden,) = self.hidden
            return sim.cnn(
                input_shape, NUM_CLASSES, channels=self.channels, hidden=hidden, seed=seed
            )
        if self.name == "mlp":
            return sim.mlp(input_shape, NUM_CLASSES, hidden=self.hidden, seed=seed)
        return sim.logistic_regression(input_shape, NUM_CLASSES, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Training:
    """``[training]``: how clients train."""

    learning_rate: float
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 20
    compare: Literal["update", "gradient"] = "update"
    precision: Literal["float32", "tf32", "bf16"] = "tf32"

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, 0 < self.learning_rate <= 1e6, "in (0, 1e6]")
        require("momentum", self.momentum, 0 <= self.momentum < 1, "in [0, 1)")
        require("weight_decay", self.weight_decay, 0 <= self.weight_decay <= 1e6, "in [0, 1e6]")
        require("batch_size", self.batch_size, self.batch_size >= 1, "at least 1")
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"epochs is {self.epochs} and steps {self.steps}; give exactly one of them"
            )
        for name in ("epochs", "steps"):
            value = getattr(self, name)
            require(name, value, value is None or value >= 1, "at least 1")
        if self.optimizer == "adam" and self.momentum:
            raise ValueError(f"momentum is {self.momentum}; adam has its own, leave it out")

    def build(self) -> LocalTraining:
        """Make the training that the simulator takes."""
        from fedbranch.training.local_training import LocalTraining, adam, sgd

        rates = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        return LocalTraining(
            optimizer=adam(**rates)
            if self.optimizer == "adam"
            else sgd(**rates, momentum=self.momentum),
            epochs=self.epochs,
            steps=self.steps,
            batch_size=self.batch_size,
            send_gradient=self.compare == "gradient",
            precision=self.precision,
        )
