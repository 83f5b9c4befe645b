"""An experiment as a TOML file: read, checked as a whole, and only then run.

The checks need no PyTorch, so a mistake is reported at once.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from fedbranch import Guard, ServerOptions
from fedbranch.cli.data_settings import Data
from fedbranch.cli.server_settings import (
    InMemoryCache,
    MultiKrum,
    OnDiskCache,
    SketchedCache,
    TrimmedMean,
    aggregate_of,
)
from fedbranch.cli.toml_settings import default_of, fill, require, table_of
from fedbranch.cli.training_settings import Model, Training
from fedbranch.errors import InvalidExperiment
from fedbranch.rules import AutoRule, Thresholds
from fedbranch.runs import Round, RunFolder
from fedbranch.types import JSON

__all__ = ["Experiment", "preset_names"]

BaselineName = Literal["fedavg", "local", "oracle", "ifca"]

# Experiments of version 0.1 do not have these settings. Where they have their defaults they are
# not saved, so that such an experiment can be resumed.
NOT_IN_OLDER_EXPERIMENTS = (
    "guard",
    "cache",
    "sketch",
    "keep_updates",
    "aggregate",
    "max_examples",
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything on which the result of a run depends.

    ``docs/experiments.md`` describes every setting.

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
    aggregate: Literal["weighted_mean", "median"] | TrimmedMean | MultiKrum = "weighted_mean"
    max_examples: float = 1e9
    guard: Guard | Literal["none"] | None = None  # None: as every method has it by default
    cache: InMemoryCache | SketchedCache | OnDiskCache = field(default_factory=InMemoryCache)
    sketch: int | None = None
    keep_updates: bool = True
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
        if not self.keep_updates and self.aggregate != "weighted_mean":
            name = self.aggregate if isinstance(self.aggregate, str) else self.aggregate.name
            raise ValueError(
                f"aggregate is {name!r} with keep_updates = false; updates that are added up as "
                "they come have no other aggregate than 'weighted_mean'"
            )
        self.options()  # checks the server's settings

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
        """Rebuild an experiment from what :meth:`to_json` returned."""
        return fill(cls, table)

    def to_json(self) -> JSON:
        """Return the experiment with its defaults, but for those of the newer settings."""
        defaults = {item.name: default_of(item) for item in fields(self)}
        return {
            name: value
            for name, value in table_of(self).items()
            if name not in NOT_IN_OLDER_EXPERIMENTS or getattr(self, name) != defaults[name]
        }

    def with_seed(self, seed: int) -> Experiment:
        """Return the same experiment with another seed."""
        try:
            return replace(self, seed=seed)
        except ValueError as error:
            raise InvalidExperiment(str(error)) from error

    @property
    def methods(self) -> list[str]:
        """The methods to run, in order."""
        return ["cfl", *self.baselines]

    def options(self, *, is_baseline: bool = False) -> ServerOptions:
        """Return the options of a server.

        Parameters
        ----------
        is_baseline
            Whether the server is that of a baseline. It has no guard unless the experiment
            names one, and it takes another rule in place of this one.
        """
        options = ServerOptions(
            rule=self.rule,
            weighting=self.weighting,
            aggregate=aggregate_of(self.aggregate),
            max_examples=self.max_examples,
            cache=self.cache.build(),
            sketch=self.sketch,
            keep_updates=self.keep_updates,
        )
        if self.guard == "none" or (self.guard is None and is_baseline):
            return replace(options, guard=None)
        return options if self.guard is None else replace(options, guard=self.guard)

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
            belongs to the machine, so it is no part of the experiment.
        resume
            Go on with the run in that folder from where it was interrupted.
        on_round
            Called with the method's name after each of its rounds.
        """
        from fedbranch import sim

        try:
            clients = self.data.clients(self.seed, data_dir)
        except ValueError as error:  # a draw that failed, such as a Dirichlet one
            raise InvalidExperiment(f"data: {error}") from error
        input_shape = next(iter(clients.values())).train.x.shape[1:]
        methods: dict[str, Callable[..., sim.Run]] = {
            "cfl": sim.simulate,
            "fedavg": sim.fedavg,
            "local": sim.local,
            "oracle": sim.oracle,
            "ifca": partial(sim.ifca, num_clusters=self.data.num_groups),
        }
        for method in self.methods:
            is_baseline = method != "cfl"
            methods[method](
                self.model.build(input_shape, seed=self.seed),
                clients,
                rounds=self.rounds,
                training=self.training.build(),
                seed=self.seed,
                participation=self.participation,
                options=self.options(is_baseline=is_baseline),
                evaluate_every=self.evaluate_every,
                checkpoint_every=self.checkpoint_every,
                engine=self.engine,
                folder=folder / "baselines" / method if is_baseline else folder,
                resume=resume,
                about={"experiment": self.to_json()},
                on_round=partial(on_round, method),
            )
        return RunFolder(folder)


def preset_names() -> list[str]:
    """Return the names of the experiments that come with fedbranch."""
    return sorted(
        path.name.removesuffix(".toml")
        for path in _presets().iterdir()
        if path.name.endswith(".toml")
    )


def _presets() -> Any:  # importlib's Traversable moved between modules in Python 3.11 and 3.14
    return resources.files("fedbranch.cli").joinpath("presets")
