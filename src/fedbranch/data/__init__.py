"""Clients' data: who gets which rows, what differs between groups, and where rows come from."""

from fedbranch.data.clients import ClientData, Examples, PartName, federate
from fedbranch.data.groups import (
    AddNoise,
    Relabel,
    Rotate,
    Transform,
    feature_noise,
    label_permutations,
    label_swaps,
    rotations,
)
from fedbranch.data.partition import dirichlet, iid, quantity_skew, shards
from fedbranch.data.sources import digits

__all__ = [
    "AddNoise",
    "ClientData",
    "Examples",
    "PartName",
    "Relabel",
    "Rotate",
    "Transform",
    "digits",
    "dirichlet",
    "feature_noise",
    "federate",
    "iid",
    "label_permutations",
    "label_swaps",
    "quantity_skew",
    "rotations",
    "shards",
]
