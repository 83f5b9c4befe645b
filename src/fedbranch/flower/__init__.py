"""Clustered federated learning in a Flower federation: a strategy in place of ``FedAvg``."""

from importlib.util import find_spec

if find_spec("flwr") is None:
    raise ImportError("fedbranch.flower needs Flower; run: pip install 'fedbranch[flower]'")

from fedbranch.flower.identity import client_id_of_key
from fedbranch.flower.result import ClusteredResult
from fedbranch.flower.strategy import ClusteredStrategy

__all__ = ["ClusteredResult", "ClusteredStrategy", "client_id_of_key"]
