"""Clustered federated learning: one model that branches where the clients' data disagree.

The names that train models are loaded, with PyTorch, when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fedbranch import moved
from fedbranch.core import theory
from fedbranch.core.blocked_linkage import hierarchy_of
from fedbranch.core.geometry import cosine_error_bound, cosine_similarity, norms, weighted_mean
from fedbranch.core.linkage import Bipartition, Hierarchy, bipartition, hierarchy, separation_gap
from fedbranch.data.clients import ClientData
from fedbranch.data.federation import federate
from fedbranch.errors import (
    CannotWrite,
    ClientFailed,
    DamagedFile,
    FedbranchError,
    FederationStalled,
    InvalidExperiment,
    InvalidUpdate,
    UnusableRun,
    UsingPreviousState,
)
from fedbranch.protocol.tasks import Task, Trial, Update, UpdateBatch
from fedbranch.rules import AutoRule, Decision, Evidence, NeverSplit, Review, Rule, Thresholds
from fedbranch.runs import Round, RunFolder
from fedbranch.server.guard import Guard
from fedbranch.server.options import ServerOptions
from fedbranch.server.records import RoundRecord, Routing
from fedbranch.server.replies.intake import Intake
from fedbranch.server.server import Server
from fedbranch.tree import Descent, Edge, InMemory, Node, OnDisk, ParameterTree, Sketched

if TYPE_CHECKING:
    from fedbranch.sim import Run, fedavg, ifca, local, oracle, simulate
    from fedbranch.training.local_training import LocalTraining, adam, sgd

__version__ = "0.1.0"

moved.lead_to_new_paths()

__all__ = [
    "AutoRule",
    "Bipartition",
    "CannotWrite",
    "ClientData",
    "ClientFailed",
    "DamagedFile",
    "Decision",
    "Descent",
    "Edge",
    "Evidence",
    "FedbranchError",
    "FederationStalled",
    "Guard",
    "Hierarchy",
    "InMemory",
    "Intake",
    "InvalidExperiment",
    "InvalidUpdate",
    "LocalTraining",
    "NeverSplit",
    "Node",
    "OnDisk",
    "ParameterTree",
    "Review",
    "Round",
    "RoundRecord",
    "Routing",
    "Rule",
    "Run",
    "RunFolder",
    "Server",
    "ServerOptions",
    "Sketched",
    "Task",
    "Thresholds",
    "Trial",
    "UnusableRun",
    "Update",
    "UpdateBatch",
    "UsingPreviousState",
    "adam",
    "bipartition",
    "cosine_error_bound",
    "cosine_similarity",
    "fedavg",
    "federate",
    "hierarchy",
    "hierarchy_of",
    "ifca",
    "local",
    "norms",
    "oracle",
    "separation_gap",
    "sgd",
    "simulate",
    "theory",
    "weighted_mean",
]

_NEEDS_TORCH = {
    "LocalTraining": "fedbranch.training.local_training",
    "adam": "fedbranch.training.local_training",
    "sgd": "fedbranch.training.local_training",
    "Run": "fedbranch.sim",
    "fedavg": "fedbranch.sim",
    "ifca": "fedbranch.sim",
    "local": "fedbranch.sim",
    "oracle": "fedbranch.sim",
    "simulate": "fedbranch.sim",
}


def __getattr__(name: str) -> object:
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module 'fedbranch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
