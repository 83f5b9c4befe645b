"""The settings of an experiment's server that TOML writes as tables: caches and aggregates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedbranch import InMemory, OnDisk, Sketched
from fedbranch.core.geometry import weighted_mean
from fedbranch.core.robust import median, multi_krum, trimmed_mean
from fedbranch.types import Aggregate

__all__ = [
    "InMemoryCache",
    "MultiKrum",
    "OnDiskCache",
    "SketchedCache",
    "TrimmedMean",
    "aggregate_of",
]


@dataclass(frozen=True, kw_only=True)
class InMemoryCache:
    """``[cache]`` with ``kind = "in-memory"``: edges keep whole updates."""

    kind: Literal["in-memory"] = "in-memory"

    def build(self) -> InMemory:
        """Make the cache."""
        return InMemory()


@dataclass(frozen=True, kw_only=True)
class SketchedCache:
    """``[cache]`` with ``kind = "sketched"``: edges keep a sketch of every update."""

    kind: Literal["sketched"]
    size: int = Sketched.size
    seed: int = Sketched.seed

    def __post_init__(self) -> None:
        self.build()

    def build(self) -> Sketched:
        """Make the cache."""
        return Sketched(size=self.size, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class OnDiskCache:
    """``[cache]`` with ``kind = "on-disk"``: edges keep whole updates in files.

    A relative folder is one in the folder from which the command is called. Files that a saved
    server needs are in its checkpoint, too.
    """

    kind: Literal["on-disk"]
    folder: str

    def build(self) -> OnDisk:
        """Make the cache."""
        return OnDisk(folder=self.folder)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean:
    """``aggregate = { name = "trimmed_mean", share = ... }``."""

    name: Literal["trimmed_mean"]
    share: float

    def __post_init__(self) -> None:
        self.build()

    def build(self) -> Aggregate:
        """Make the aggregate."""
        return trimmed_mean(self.share)


@dataclass(frozen=True, kw_only=True)
class MultiKrum:
    """``aggregate = { name = "multi_krum", num_attackers = ..., num_kept = ... }``."""

    name: Literal["multi_krum"]
    num_attackers: int
    num_kept: int | None = None

    def __post_init__(self) -> None:
        self.build()

    def build(self) -> Aggregate:
        """Make the aggregate."""
        return multi_krum(self.num_attackers, self.num_kept)


def aggregate_of(setting: str | TrimmedMean | MultiKrum) -> Aggregate:
    """Return the aggregate that a setting names."""
    if isinstance(setting, str):
        return {"weighted_mean": weighted_mean, "median": median}[setting]
    return setting.build()
