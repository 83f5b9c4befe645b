"""Published data sets, read from files in their own formats.

The data folder contains a folder for each set. Files are checked whenever they are read. A file
that is cut, damaged or not the published one is an error and never used. Nothing is unpickled.
"""

from fedbranch.data.sources.catalogue import (
    NAMES,
    Holding,
    PartHolding,
    check,
    fetch,
    is_present,
    look,
)
from fedbranch.data.sources.downloads import Download
from fedbranch.data.sources.files import PartOfSet, default_data_dir
from fedbranch.data.sources.images import cifar10, digits, fashion_mnist, mnist
from fedbranch.data.sources.texts import AG_NEWS_TOPICS, Articles, Role, ag_news, shakespeare

__all__ = [
    "AG_NEWS_TOPICS",
    "NAMES",
    "Articles",
    "Download",
    "Holding",
    "PartHolding",
    "PartOfSet",
    "Role",
    "ag_news",
    "check",
    "cifar10",
    "default_data_dir",
    "digits",
    "fashion_mnist",
    "fetch",
    "is_present",
    "look",
    "mnist",
    "shakespeare",
]
