"""Clustered federated learning in a Flower federation: a strategy in place of ``FedAvg``."""

try:
    import flwr.serverapp  # noqa: F401 -- only to see whether it is there
except ModuleNotFoundError as error:
    raise ImportError(
        f"fedbranch.flower needs Flower ({error}); run: pip install 'fedbranch[flower]'"
    ) from error

from fedbranch.flower.hidden.agreement_node import AgreementMod
from fedbranch.flower.hidden.agreement_server import Agreed, agree
from fedbranch.flower.hidden.mod import hidden_arrays, reveal, transform_mod
from fedbranch.flower.node_ids import client_id_of_key
from fedbranch.flower.result import ClusteredResult
from fedbranch.flower.strategy import ClusteredStrategy

__all__ = [
    "Agreed",
    "AgreementMod",
    "ClusteredResult",
    "ClusteredStrategy",
    "agree",
    "client_id_of_key",
    "hidden_arrays",
    "reveal",
    "transform_mod",
]
