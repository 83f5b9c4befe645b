"""The ``[data]`` table of an experiment: which rows each client gets, what differs between groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from fedbranch.cli.toml_settings import require
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

__all__ = ["DIGITS_ROWS", "DIGITS_WIDTH", "IMAGE_SETS", "NUM_CLASSES", "Data"]

# Known without loading the data, so that a mistake is found at once.
DIGITS_ROWS, DIGITS_WIDTH = 1797, 8
IMAGE_SETS = {images.name: images for images in (MNIST, FASHION_MNIST, CIFAR10)}
NUM_CLASSES = 10  # of each of them
LABEL_PAIRS = NUM_CLASSES * (NUM_CLASSES - 1) // 2


@dataclass(frozen=True, kw_only=True)
class Data:
    """``[data]``: the rows of each client, and what differs between the groups."""

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
        if self.source in IMAGE_SETS:
            num_rows = IMAGE_SETS[self.source].published_rows["train"]
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
        return IMAGE_SETS[self.source].shape[-1] if self.source in IMAGE_SETS else DIGITS_WIDTH

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
        if self.source in IMAGE_SETS:
            x, y = IMAGE_SETS[self.source].load("train", data_dir)
            if self.held_out == "shared":
                test = IMAGE_SETS[self.source].load("test", data_dir)
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
