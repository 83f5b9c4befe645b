"""The simulator: a whole federation on one machine, and baselines to compare with."""

from fedbranch.sim.baselines import fedavg, ifca, local, oracle
from fedbranch.sim.models import (
    LanguageModel,
    Normalised,
    cnn,
    language_model,
    logistic_regression,
    mlp,
)
from fedbranch.sim.run import Run
from fedbranch.sim.simulation import Settings, simulate

__all__ = [
    "LanguageModel",
    "Normalised",
    "Run",
    "Settings",
    "cnn",
    "fedavg",
    "ifca",
    "language_model",
    "local",
    "logistic_regression",
    "mlp",
    "oracle",
    "simulate",
]
