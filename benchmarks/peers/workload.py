"""The federated workload that every peer runs, read from one folder.

The folder holds ``workload.json`` (the numbers of :class:`Workload`), ``clients.npz``
(``x``, ``y`` of all clients one after the other, and ``sizes``) and ``initial.npz``
(``p0``, ``p1``, ... in the order of ``model.parameters()``). Needs torch and numpy only,
so that it runs in the environment of any peer.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

NUM_WORKERS = 2  # processes that train clients side by side, in every peer


@dataclass(frozen=True, kw_only=True)
class Workload:
    """FedAvg with all clients in every round, and the data it runs on."""

    model: str  # "cnn" or "mlp"
    rounds: int
    learning_rate: float
    batch_size: int
    epochs: int
    num_clients: int
    clients: list[tuple[Tensor, Tensor]]  # x and y of each client, views of one array
    initial: list[Tensor]


def load_workload(folder: Path) -> Workload:
    """Read a workload folder.

    Raises
    ------
    ValueError
        If the number of clients in the two files differs.
    """
    numbers = json.loads((folder / "workload.json").read_text())
    with np.load(folder / "clients.npz") as arrays:
        sizes = arrays["sizes"].tolist()
        x = torch.from_numpy(arrays["x"]).split(sizes)
        y = torch.from_numpy(arrays["y"]).split(sizes)
    with np.load(folder / "initial.npz") as arrays:
        initial = [torch.from_numpy(arrays[f"p{i}"]) for i in range(len(arrays))]
    if len(sizes) != numbers["num_clients"]:
        raise ValueError(
            f"workload.json announces {numbers['num_clients']} clients, but clients.npz holds "
            f"{len(sizes)}; write both files again"
        )
    return Workload(**numbers, clients=list(zip(x, y, strict=True)), initial=initial)


def build_model(workload: Workload) -> nn.Sequential:
    """Build the model of a workload, with its initial parameters."""
    model = _cnn() if workload.model == "cnn" else _mlp()
    set_parameters(model, workload.initial)
    return model


def _cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@torch.no_grad()
def set_parameters(model: nn.Module, values: list[Tensor]) -> None:
    """Copy ``values`` into the parameters of a model."""
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


def shuffled_batches(x: Tensor, y: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through the rows once, in a new order from torch's global generator."""
    order = torch.randperm(len(x))
    # One gather for the whole epoch; the batches are views of it.
    return zip(x[order].split(batch_size), y[order].split(batch_size), strict=True)


def train(model: nn.Module, x: Tensor, y: Tensor, workload: Workload) -> None:
    """Train a model in place on the rows of one client."""
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.learning_rate)
    for _ in range(workload.epochs):
        for batch_x, batch_y in shuffled_batches(x, y, workload.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch_x), batch_y).backward()
            optimizer.step()


def write_result(
    path: Path,
    *,
    peer: str,
    versions: dict[str, str],
    seconds_per_round: list[float],
    model: nn.Module,
    workload: Workload,
) -> None:
    """Write what a peer measured, and what shows that it trained the same as the others."""
    result = {
        "peer": peer,
        "versions": versions,
        "seconds_per_round": seconds_per_round,
        "final_norm": _distance_from_initial(model, workload),
        "mean_loss": _mean_loss(model, workload),
    }
    path.write_text(json.dumps(result, indent=2) + "\n")


@torch.no_grad()
def _distance_from_initial(model: nn.Module, workload: Workload) -> float:
    moved = [p - p0 for p, p0 in zip(model.parameters(), workload.initial, strict=True)]
    return torch.cat([m.double().flatten() for m in moved]).norm().item()


@torch.no_grad()
def _mean_loss(model: nn.Module, workload: Workload) -> float:
    losses = [nn.functional.cross_entropy(model(x), y).item() for x, y in workload.clients]
    return sum(losses) / len(losses)
