"""An experiment as a TOML file: read, checked as a whole, and only then run.

The checks need no PyTorch, so a mistake is reported at once.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedbranch.cli.toml_settings import fill, require
from fedbranch.data import (
    ClientData,
    Transform,
    digits,
    dirichlet,
    feature_noise,
    federate,
    iid,
    label_permutations,
    label_swaps,
    quantity_skew,
    rotations,
    shards,
)
from fedbranch.data.federation import Partition
from fedbranch.data.sources.images import CIFAR10, FASHION_MNIST, MNIST
from fedbranch.errors import InvalidExperiment
from fedbranch.rules import AutoRule, Thresholds
from fedbranch.runs import Round, RunFolder
from fedbranch.types import JSON

if TYPE_CHECKING:  # both load PyTorch
    from torch import nn

    from fedbranch.training.local_training import LocalTraining

__all__ = ["Data", "Experiment", "Model", "Training", "preset_names"]

# Known without loading the data, so that a mistake is found at once.
DIGITS_ROWS, DIGITS_WIDTH = 1797, 8
PUBLISHED = {images.name: images for images in (MNIST, FASHION_MNIST, CIFAR10)}
NUM_CLASSES = 10  # of each of them
LABEL_PAIRS = NUM_CLASSES * (NUM_CLASSES - 1) // 2

BaselineName = Literal["fedavg", "local", "oracle", "ifca"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """``[data]``: whose data, dealt out how, and what differs between the groups."""

    num_clients: int
    source: Literal["digits", "mnist", "fashion_mnist", "cifar10"] = "digits"
    num_groups: int = 1
    structure: Literal["none", "label-swap", "label-permutation", "rotation", "feature-noise"] = (
        "none"
    )
    noise: float = 0.3  # of the noisiest group, for feature-noise
    partition: Literal["iid", "dirichlet", "shards", "quantity-skew"] = "iid"
    alpha: float = 0.5  # for dirichlet
    shards_per_client: int = 2  # for shards
    ratio: float = 10.0  # of the largest to the smallest client, for quantity-skew
    held_out: Literal["shared", "own"] = "shared"
    test_fraction: float = 0.2
    validation_fraction: float = 0.0  # of every client's training rows, held out for decisions

    def __post_init__(self) -> None:
        require("test_fraction", self.test_fraction, 0 < self.test_fraction < 1, "between 0 and 1")
        require(
            "validation_fraction",
            self.validation_fraction,
            0 <= self.validation_fraction < 1,
            "at least 0 and below 1",
        )
        # Every client needs at least two rows, to train on or to split into two parts.
        num_rows = DIGITS_ROWS
        if self.source in PUBLISHED:
            num_rows = PUBLISHED[self.source].published_rows["train"]
        elif self.held_out == "shared":
            num_rows -= round(num_rows * self.test_fraction)
        most = num_rows // 2
        require(
            "num_clients",
            self.num_clients,
            1 <= self.num_clients <= most,
            f"between 1 and {most}, for the {num_rows} rows there are",
        )
        most = min(self.num_clients, LABEL_PAIRS if self.structure == "label-swap" else num_rows)
        require(
            "num_groups", self.num_groups, 1 <= self.num_groups <= most, f"between 1 and {most}"
        )
        most = num_rows // self.num_clients
        require(
            "shards_per_client",
            self.shards_per_client,
            1 <= self.shards_per_client <= most or self.partition != "shards",
            f"between 1 and {most}, for the {num_rows} rows there are",
        )
        for name in ("noise", "alpha", "ratio"):
            value = getattr(self, name)
            least = 1 if name == "ratio" else 1e-3
            require(name, value, least <= value <= 1e6, f"between {least:g} and 1e6")
        if self.structure == "none" and self.num_groups > 1:
            raise ValueError(
                f"structure is 'none' with num_groups = {self.num_groups}; name what differs "
                "between the groups, such as 'label-swap'"
            )

    @property
    def image_width(self) -> int:
        """Width and height of an image."""
        return PUBLISHED[self.source].shape[-1] if self.source in PUBLISHED else DIGITS_WIDTH

    def clients(self, seed: int, data_dir: Path | None = None) -> dict[str, ClientData]:
        """Make the clients; the data folder is as for :func:`fedbranch.data.mnist`."""
        structures: dict[str, Callable[[], list[Transform]]] = {
            "none": list,
            "label-swap": lambda: label_swaps(self.num_groups, seed=seed),
            "label-permutation": lambda: label_permutations(self.num_groups, seed=seed),
            "rotation": lambda: rotations(self.num_groups),
            "feature-noise": lambda: feature_noise(self.num_groups, standard_deviation=self.noise),
        }
        partitions: dict[str, Partition] = {
            "iid": iid,
            "dirichlet": partial(dirichlet, alpha=self.alpha),
            "shards": partial(shards, shards_per_client=self.shards_per_client),
            "quantity-skew": partial(quantity_skew, ratio=self.ratio),
        }
        test = None
        if self.source in PUBLISHED:
            x, y = PUBLISHED[self.source].load("train", data_dir)
            if self.held_out == "shared":
                test = PUBLISHED[self.source].load("test", data_dir)
        else:
            x, y = digits()
        return federate(
            x,
            y,
            test=test,
            num_clients=self.num_clients,
            groups=structures[self.structure](),
            partition=partitions[self.partition],
            held_out=self.held_out,
            test_fraction=self.test_fraction,
            validation_fraction=self.validation_fraction,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """``[model]``: what is trained."""

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
        """Make what the simulator takes."""
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


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that a run depends on.

    Examples
    --------
    >>> Experiment.preset("demo").data.num_clients
    20
    """

    rounds: int
    data: Data
    training: Training
    rule: AutoRule | Thresholds = field(default_factory=AutoRule)
    model: Model = field(default_factory=Model)
    seed: int = 0
    participation: float = 1.0
    weighting: Literal["examples", "equal"] = "examples"
    evaluate_every: int = 1
    checkpoint_every: int = 10
    engine: Literal["auto", "workers", "vectorised", "reference"] = "auto"
    baselines: tuple[BaselineName, ...] = ("fedavg",)

    def __post_init__(self) -> None:
        require("rounds", self.rounds, self.rounds >= 1, "at least 1")
        require("seed", self.seed, self.seed >= 0, "at least 0")
        require("participation", self.participation, 0 < self.participation <= 1, "in (0, 1]")
        require("evaluate_every", self.evaluate_every, self.evaluate_every >= 1, "at least 1")
        require("checkpoint_every", self.checkpoint_every, self.checkpoint_every >= 1, "at least 1")
        require(
            "baselines",
            list(self.baselines),
            len(set(self.baselines)) == len(self.baselines),
            "without repetitions",
        )
        width = self.data.image_width
        most = width.bit_length() - 1
        require(
            "model.channels",
            list(self.model.channels),
            len(self.model.channels) <= most or self.model.name != "cnn",
            f"at most {most} numbers: an image of {width} x {width} can be halved that often",
        )

    @classmethod
    def load(cls, path: str | Path) -> Experiment:
        """Read an experiment from a TOML file.

        Raises
        ------
        InvalidExperiment
            Naming the field, its value and what is allowed.
        """
        try:
            return cls.parse(Path(path).read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise InvalidExperiment(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InvalidExperiment(f"{path} cannot be read: {error}") from error

    @classmethod
    def preset(cls, name: str) -> Experiment:
        """Load one of the experiments that come with fedbranch."""
        if name not in preset_names():
            close = difflib.get_close_matches(name, preset_names(), n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise InvalidExperiment(
                f"there is no file and no preset {name!r}; {hint}presets: {', '.join(preset_names())}"
            )
        return cls.parse(_presets().joinpath(f"{name}.toml").read_text(encoding="utf-8"), name)

    @classmethod
    def parse(cls, text: str, name: str) -> Experiment:
        """Read an experiment from TOML; the name is for messages."""
        try:
            return cls.from_json(tomllib.loads(text))
        except RecursionError as error:
            raise InvalidExperiment(f"{name}: too deeply nested to be an experiment") from error
        except (ValueError, InvalidExperiment) as error:  # tomllib's own error is a ValueError
            raise InvalidExperiment(f"{name}: {error}") from error

    @classmethod
    def from_json(cls, table: JSON) -> Experiment:
        """Rebuild an experiment from what :meth:`to_json` gave."""
        return fill(cls, table)

    def to_json(self) -> JSON:
        """Describe the experiment with all its defaults."""
        return _without_none(asdict(self))

    def with_seed(self, seed: int) -> Experiment:
        """Give the same experiment with another seed."""
        try:
            return replace(self, seed=seed)
        except ValueError as error:
            raise InvalidExperiment(str(error)) from error

    @property
    def methods(self) -> list[str]:
        """What is run, in order."""
        return ["cfl", *self.baselines]

    def run(
        self,
        folder: Path,
        *,
        data_dir: Path | None = None,
        resume: bool = False,
        on_round: Callable[[str, Round], None] = lambda _method, _round: None,
    ) -> RunFolder:
        """Run clustered federated learning and the baselines.

        Parameters
        ----------
        folder
            Becomes the run folder, with the baselines' run folders inside.
        data_dir
            Where data sets are; by default :func:`fedbranch.data.sources.default_data_dir`. It
            is a matter of the machine, so it is no part of the experiment.
        resume
            Go on where the run in that folder was interrupted.
        on_round
            Called with the method's name after each of its rounds.
        """
        from fedbranch import sim

        try:
            clients = self.data.clients(self.seed, data_dir)
        except ValueError as error:  # a draw that did not work out, such as a Dirichlet one
            raise InvalidExperiment(f"data: {error}") from error
        input_shape = next(iter(clients.values())).train.x.shape[1:]
        methods: dict[str, Callable[..., sim.Run]] = {
            "cfl": partial(sim.simulate, rule=self.rule),
            "fedavg": sim.fedavg,
            "local": sim.local,
            "oracle": sim.oracle,
            "ifca": partial(sim.ifca, num_clusters=self.data.num_groups),
        }
        for method in self.methods:
            methods[method](
                self.model.build(input_shape, seed=self.seed),
                clients,
                rounds=self.rounds,
                training=self.training.build(),
                seed=self.seed,
                participation=self.participation,
                weighting=self.weighting,
                evaluate_every=self.evaluate_every,
                checkpoint_every=self.checkpoint_every,
                engine=self.engine,
                folder=folder if method == "cfl" else folder / "baselines" / method,
                resume=resume,
                about={"experiment": self.to_json()},
                on_round=partial(on_round, method),
            )
        return RunFolder(folder)


def preset_names() -> list[str]:
    """Name the experiments that come with fedbranch."""
    return sorted(
        path.name.removesuffix(".toml")
        for path in _presets().iterdir()
        if path.name.endswith(".toml")
    )


def _presets() -> Any:  # importlib's Traversable moved between modules in Python 3.11 and 3.14
    return resources.files("fedbranch.cli").joinpath("presets")


def _without_none(table: JSON) -> JSON:
    """TOML has no null: what is not set is left out."""
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }
