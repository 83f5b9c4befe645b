"""The simulator: a whole federation on one machine, and the methods to compare with."""

from fedbranch.sim.baselines import fedavg, ifca, local, oracle
from fedbranch.sim.models import Normalised, cnn, logistic_regression, mlp
from fedbranch.sim.simulation import Run, Settings, simulate

__all__ = [
    "Normalised",
    "Run",
    "Settings",
    "cnn",
    "fedavg",
    "ifca",
    "local",
    "logistic_regression",
    "mlp",
    "oracle",
    "simulate",
]
