"""Time rounds of FedAvg on pfl-research's simulated backend.

Usage: ``python pfl_peer.py WORKLOAD_DIR RESULT.json``, in an environment with torch and pfl.
The file format is in ``workload.py``.

pfl runs the same script in every worker process and sums the updates with
``torch.distributed``. This script starts itself once more under torchrun, with two workers
that talk gloo over loopback.
"""

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from workload import (
    NUM_WORKERS,
    Workload,
    build_model,
    load_workload,
    shuffled_batches,
    write_result,
)

WORKER_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # pfl chooses nccl as soon as there is a GPU
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PFL_PYTORCH_DEVICE": "cpu",  # else pfl looks for a device with every batch
}


class PflModule(nn.Module):
    """The workload's model with the two methods that pfl asks for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits."""
        return self.model(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the mean cross entropy of a batch."""
        return nn.functional.cross_entropy(self.model(x), y)

    def metrics(self, *_: Tensor) -> dict[str, float]:
        """Return no metrics: these runs do not evaluate."""
        return {}


class ShuffledDataset(PyTorchTensorDataset):
    """A client's rows in a new order each epoch; pfl's own keeps one order for ever."""

    def iter(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through the rows once."""
        x, y = self.raw_data
        return shuffled_batches(x, y, batch_size)


class TrainOnly(FederatedAveraging):
    """FedAvg without the evaluation that pfl always runs in its first round."""

    def get_next_central_contexts(self, *args, **kwargs):
        """Ask for the same round, but only to train."""
        contexts, model, metrics = super().get_next_central_contexts(*args, **kwargs)
        if contexts is not None:
            contexts = tuple(dataclasses.replace(c, do_evaluation=False) for c in contexts)
        return contexts, model, metrics


class Stopwatch(TrainingProcessCallback):
    """Notes the wall time of each round."""

    def __init__(self) -> None:
        self.seconds_per_round: list[float] = []

    def on_train_begin(self, **_) -> Metrics:
        """Start the clock when both workers are ready, so that no start-up is counted."""
        torch.distributed.barrier()
        self._start_s = time.perf_counter()
        return Metrics()

    def after_central_iteration(self, *_, **__) -> tuple[bool, Metrics]:
        """Note the round that has just ended."""
        now_s = time.perf_counter()
        self.seconds_per_round.append(now_s - self._start_s)
        self._start_s = now_s
        return False, Metrics()


def federated_dataset(workload: Workload) -> FederatedDataset:
    """Build the clients of a workload, each drawn once per round."""
    users = [ShuffledDataset(xy, user_id=str(i)) for i, xy in enumerate(workload.clients)]
    # Given the sizes, pfl shares out each cohort by load. Without them it repeats and omits
    # clients when their number is not a multiple of the number of workers.
    size_of_user = {i: len(user) for i, user in enumerate(users)}
    sampler = MinimizeReuseUserSampler(range(len(users)))
    return FederatedDataset(users.__getitem__, sampler, size_of_user)


def train_rounds(module: PflModule, workload: Workload) -> list[float]:
    """Train a module in place and return the seconds of each round."""
    data = federated_dataset(workload)
    stopwatch = Stopwatch()
    TrainOnly().run(
        NNAlgorithmParams(
            central_num_iterations=workload.rounds,
            evaluation_frequency=workload.rounds,
            train_cohort_size=workload.num_clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        # With this central optimizer the new model is the average of the clients' models.
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_num_epochs=workload.epochs,
            local_learning_rate=workload.learning_rate,
            local_batch_size=workload.batch_size,
        ),
        callbacks=[stopwatch],
        send_metrics_to_platform=False,
    )
    return stopwatch.seconds_per_round


def run_worker(folder: Path, result_path: Path) -> None:
    """Run the workload as one of pfl's workers; rank 0 writes the result."""
    torch.set_num_threads(1)
    workload = load_workload(folder)
    module = PflModule(build_model(workload))
    seconds_per_round = train_rounds(module, workload)
    if torch.distributed.get_rank() == 0:
        write_result(
            result_path,
            peer="pfl",
            versions={name: importlib.metadata.version(name) for name in ("pfl", "torch")},
            seconds_per_round=seconds_per_round,
            model=module,
            workload=workload,
        )
    torch.distributed.destroy_process_group()


def start_workers(arguments: list[str]) -> int:
    """Run this script in two processes and return torchrun's exit code."""
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(NUM_WORKERS)),
    ]
    return subprocess.run(  # noqa: S603 -- our own interpreter and script
        [*torchrun, __file__, *arguments], env=os.environ | WORKER_ENVIRONMENT, check=False
    ).returncode


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(start_workers(sys.argv[1:]))
    run_worker(Path(sys.argv[1]), Path(sys.argv[2]))
