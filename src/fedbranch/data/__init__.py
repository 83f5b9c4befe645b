"""Clients' data: examples, partitions, differences between groups, and published data sets."""

from fedbranch.data.clients import ClientData, PartName
from fedbranch.data.examples import Examples
from fedbranch.data.federation import federate
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
from fedbranch.data.sources import (
    AG_NEWS_TOPICS,
    Articles,
    Role,
    ag_news,
    cifar10,
    digits,
    fashion_mnist,
    mnist,
    shakespeare,
)
from fedbranch.data.text import Vocabulary, next_word_windows, words_of

__all__ = [
    "AG_NEWS_TOPICS",
    "AddNoise",
    "Articles",
    "ClientData",
    "Examples",
    "PartName",
    "Relabel",
    "Role",
    "Rotate",
    "Transform",
    "Vocabulary",
    "ag_news",
    "cifar10",
    "digits",
    "dirichlet",
    "fashion_mnist",
    "feature_noise",
    "federate",
    "iid",
    "label_permutations",
    "label_swaps",
    "mnist",
    "next_word_windows",
    "quantity_skew",
    "rotations",
    "shakespeare",
    "shards",
    "words_of",
]
