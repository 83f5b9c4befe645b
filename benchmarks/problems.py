"""Federations drawn at random: what differs between the clients, on which data, trained how.

A problem is named by its family and a seed; everything else is drawn from ranges. The same
family and seed are the same problem on every machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

import fedbranch as fb
from fedbranch.data import (
    Relabel,
    Transform,
    digits,
    dirichlet,
    fashion_mnist,
    feature_noise,
    federate,
    iid,
    label_permutations,
    label_swaps,
    mnist,
    quantity_skew,
    rotations,
    shards,
)
from fedbranch.data.federation import Partition
from fedbranch.sim import cnn, logistic_regression, mlp

Kind = Literal["incongruent", "congruent", "label skew"]
Rng = np.random.Generator

NUM_CLASSES = 10
VALIDATION = 0.15  # of every client's own training rows
LEARNING_RATES = {  # lowest and highest of each optimiser: a factor of 30
    "sgd": (0.01, 0.3),
    "momentum": (0.002, 0.06),
    "adam": (0.0003, 0.009),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A federation to be trained."""

    family: str
    kind: Kind
    seed: int
    model: nn.Module
    clients: dict[str, fb.ClientData]
    training: fb.LocalTraining
    participation: float
    drawn: dict[str, Any]  # for people: what was drawn

    @property
    def groups(self) -> dict[str, str]:
        """Client id -> true group."""
        return {i: str(client.group) for i, client in self.clients.items()}

    @property
    def num_groups(self) -> int:
        """How many true groups there are."""
        return len(set(self.groups.values()))


@dataclass(frozen=True, kw_only=True)
class Family:
    """What all problems of one name have in common."""

    kind: Kind
    groups: Callable[[Rng], list[Transform]] = lambda _: []
    sizes: tuple[int, ...] | None = None  # clients of each group, if not equal
    partition: Partition = iid
    rows: tuple[int, int] = (60, 500)  # training rows of a client: fewest and most
    data: tuple[str, ...] = ("digits", "mnist", "fashion")
    models: tuple[str, ...] = ("logistic", "mlp", "cnn")
    fixed: dict[str, Any] = field(default_factory=dict)


def _seed(rng: Rng) -> int:
    return int(rng.integers(2**31))


def _swaps(num_groups: int) -> Callable[[Rng], list[Transform]]:
    return lambda rng: label_swaps(num_groups, seed=_seed(rng))


def _permutations(num_groups: int) -> Callable[[Rng], list[Transform]]:
    return lambda rng: label_permutations(num_groups, seed=_seed(rng))


def _half_in_conflict(rng: Rng) -> list[Transform]:
    """Two groups that agree on five labels and go round in a circle with the others."""
    chosen = rng.permutation(NUM_CLASSES)[:5]
    labels = np.arange(NUM_CLASSES)
    labels[chosen] = np.roll(chosen, 1)
    return [Relabel(tuple(range(NUM_CLASSES))), Relabel(tuple(labels.tolist()))]


FAMILIES: dict[str, Family] = {
    **{f"label swap, k = {k}": Family(kind="incongruent", groups=_swaps(k)) for k in range(2, 7)},
    **{
        f"label permutation, k = {k}": Family(kind="incongruent", groups=_permutations(k))
        for k in range(2, 7)
    },
    **{
        f"rotation, k = {k}": Family(kind="incongruent", groups=lambda _, k=k: rotations(k))
        for k in (2, 4)
    },
    "half of the labels in conflict": Family(kind="incongruent", groups=_half_in_conflict),
    "groups of 18 and 2": Family(kind="incongruent", groups=_permutations(2), sizes=(18, 2)),
    "groups of 12, 5 and 3": Family(kind="incongruent", groups=_permutations(3), sizes=(12, 5, 3)),
    "one outlier": Family(kind="incongruent", groups=_permutations(2), sizes=(19, 1)),
    "client sizes 1:20": Family(
        kind="incongruent", groups=_permutations(3), partition=partial(quantity_skew, ratio=20.0)
    ),
    "scarce data": Family(kind="incongruent", groups=_permutations(3), rows=(15, 40)),
    "plenty of data": Family(
        kind="incongruent", groups=_swaps(4), rows=(600, 1200), data=("mnist", "fashion")
    ),
    "XOR, linear model": Family(
        kind="incongruent", rows=(20, 200), data=("xor",), models=("logistic",)
    ),
    "half of the clients take part": Family(
        kind="incongruent", groups=_swaps(3), fixed={"participation": 0.5}
    ),
    "a fifth of the clients take part": Family(
        kind="incongruent", groups=_permutations(2), fixed={"participation": 0.2}
    ),
    "iid": Family(kind="congruent"),
    "Dirichlet 1.0": Family(kind="congruent", partition=partial(dirichlet, alpha=1.0, min_rows=4)),
    "Dirichlet 0.5": Family(kind="congruent", partition=partial(dirichlet, alpha=0.5, min_rows=4)),
    "quantity skew": Family(kind="congruent", partition=partial(quantity_skew, ratio=20.0)),
    "feature noise": Family(
        kind="congruent", groups=lambda _: feature_noise(4, standard_deviation=0.3)
    ),
    "Dirichlet 0.1": Family(kind="label skew", partition=partial(dirichlet, alpha=0.1, min_rows=4)),
    "digits 0-4 and 5-9": Family(kind="label skew"),
    "two labels each": Family(kind="label skew", partition=shards),
}


def draw(family: str, seed: int, data_dir: Path | None) -> Problem:
    """Draw a problem.

    Parameters
    ----------
    family
        One of :data:`FAMILIES`.
    seed
        Everything that is not given by the family is drawn from it.
    data_dir
        Where MNIST and Fashion-MNIST are; without it only digits are drawn.
    """
    of = FAMILIES[family]
    rng = np.random.default_rng([seed, *family.encode()])
    embedded = tuple(name for name in of.data if name in ("digits", "xor"))
    names = of.data if data_dir is not None else embedded
    if not names:
        raise ValueError(f"{family!r} needs MNIST or Fashion-MNIST; pass --data-dir")
    drawn: dict[str, Any] = {
        "data": str(rng.choice(names)),
        "model": str(rng.choice(of.models)),
        "optimizer": str(rng.choice(["sgd", "sgd", "momentum", "adam"])),
        "epochs": int(rng.choice([1, 3, 10])),
        "batch_size": int(rng.choice([10, 20, 50])),
        "rows": int(_log_uniform(rng, *of.rows)),
        "num_clients": 20 if of.sizes else int(rng.integers(15, 31)),
        "participation": 1.0,
    }
    drawn["learning_rate"] = float(f"{_log_uniform(rng, *LEARNING_RATES[drawn['optimizer']]):.2g}")
    drawn |= of.fixed
    model_seed, data_seed = _seed(rng), _seed(rng)
    transforms = of.groups(rng)
    x, y = _rows(drawn["data"], data_dir, rng)
    if family == "digits 0-4 and 5-9":
        clients = _by_label_half(x, y, drawn, data_seed)
    elif drawn["data"] == "xor":
        clients = _xor(drawn, rng)
    else:
        clients = _dealt(x, y, of, transforms, drawn, data_seed, rng)
    input_shape = next(iter(clients.values())).train.x.shape[1:]
    make: dict[str, Callable[[], nn.Module]] = {
        "logistic": lambda: logistic_regression(input_shape, NUM_CLASSES, seed=model_seed),
        "mlp": lambda: mlp(input_shape, NUM_CLASSES, hidden=(64,), seed=model_seed),
        "cnn": lambda: cnn(input_shape, NUM_CLASSES, channels=(8, 16), hidden=32, seed=model_seed),
    }
    rate = drawn["learning_rate"]
    optimizers = {
        "sgd": fb.sgd(rate),
        "momentum": fb.sgd(rate, momentum=0.9),
        "adam": fb.adam(rate),
    }
    return Problem(
        family=family,
        kind=of.kind,
        seed=seed,
        model=make[drawn["model"]](),
        clients=clients,
        training=fb.LocalTraining(
            optimizer=optimizers[drawn["optimizer"]],
            epochs=drawn["epochs"],
            batch_size=drawn["batch_size"],
        ),
        participation=drawn["participation"],
        drawn=drawn,
    )


def _log_uniform(rng: Rng, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _dealt(
    x: NDArray[Any],
    y: NDArray[Any],
    of: Family,
    transforms: list[Transform],
    drawn: dict[str, Any],
    seed: int,
    rng: Rng,
) -> dict[str, fb.ClientData]:
    """Deal rows out to clients, each with training and held-out rows of its own."""
    num_clients, held_out = drawn["num_clients"], _num_held_out(drawn)
    each = min(drawn["rows"] + held_out, len(y) // num_clients)
    drawn["rows"] = each - held_out
    chosen = rng.permutation(len(y))[: each * num_clients]
    group_of = None
    if of.sizes:
        group_of = [group for group, size in enumerate(of.sizes) for _ in range(size)]
    return federate(
        x[chosen],
        y[chosen],
        num_clients=num_clients,
        groups=transforms,
        group_of=group_of,
        partition=of.partition,
        held_out="own",
        test_fraction=held_out / each,
        validation_fraction=VALIDATION,
        seed=seed,
    )


def _num_held_out(drawn: dict[str, Any]) -> int:
    return 20 if drawn["data"] == "digits" else 120


def _by_label_half(
    x: NDArray[Any], y: NDArray[Any], drawn: dict[str, Any], seed: int
) -> dict[str, fb.ClientData]:
    """Every second client has the labels 0 to 4, the others 5 to 9."""
    num_clients, held_out = drawn["num_clients"], _num_held_out(drawn)
    clients = {}
    for half in range(2):
        rows = np.flatnonzero((y >= 5) == half)
        num_here = (num_clients + 1 - half) // 2
        each = min(drawn["rows"] + held_out, len(rows) // num_here)
        drawn["rows"] = each - held_out
        rows = np.random.default_rng(seed).permutation(rows)[: each * num_here]
        for i, client in enumerate(
            federate(
                x[rows],
                y[rows],
                num_clients=num_here,
                held_out="own",
                test_fraction=held_out / each,
                validation_fraction=VALIDATION,
                seed=seed + half,
            ).values()
        ):
            clients[f"client-{2 * i + half:02}"] = fb.ClientData(
                client.train, client.test, validation=client.validation, group=str(half)
            )
    return clients


def _xor(drawn: dict[str, Any], rng: Rng) -> dict[str, fb.ClientData]:
    """Make the paper's toy: one group sees the upper half of an XOR problem, the other the lower."""
    clients = {}
    for i in range(drawn["num_clients"]):
        num_validation = max(1, round(VALIDATION * drawn["rows"]))
        x = rng.uniform(-1, 1, (drawn["rows"] + 120, 2)).astype(np.float32)
        x[:, 1] = np.abs(x[:, 1]) * (1 if i % 2 else -1)
        y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
        test, validation, train = np.split(np.arange(len(y)), [120, 120 + num_validation])
        clients[f"client-{i:02}"] = fb.ClientData(
            (x[train], y[train]),
            (x[test], y[test]),
            validation=(x[validation], y[validation]),
            group=str(i % 2),
        )
    return clients


def _rows(name: str, data_dir: Path | None, rng: Rng) -> tuple[NDArray[Any], NDArray[Any]]:
    if name == "xor":
        return np.zeros((0, 2), np.float32), np.zeros(0, np.int64)
    if name == "digits":
        return digits()
    assert data_dir is not None
    load = {"mnist": mnist, "fashion": fashion_mnist}[name]
    images, labels = load("train", data_dir, raw=True)
    chosen = rng.permutation(len(labels))
    return images[chosen].astype(np.float32) / 255, labels[chosen]
