"""Planted groups of updates, and edges and trees made of them."""

import numpy as np

from fedbranch import InMemory, OnDisk, ParameterTree, Sketched

LONG = 3000  # numbers of an update, many more than of a sketch


def caches(folder):
    return {
        "memory": InMemory(),
        "sketches": Sketched(size=256, seed=5),
        "disk": OnDisk(folder=folder / "edges"),
    }


KINDS = ["memory", "sketches", "disk"]


def planted(seed, *, num_groups=3, num_clients=6, dim=LONG, noise=1.0):
    """Draw groups of updates, each around a direction; return them, the directions, the generator."""
    rng = np.random.default_rng(seed)
    pulls = rng.normal(size=(num_groups, dim)).astype(np.float32)
    groups = [
        {
            f"{group}-{n}": (pull + noise * rng.normal(size=dim)).astype(np.float32)
            for n in range(num_clients)
        }
        for group, pull in enumerate(pulls)
    ]
    return groups, pulls, rng


def split_tree(cache, groups, dim=LONG):
    tree = ParameterTree(dim, cache=cache)
    tree.split(0, groups)
    return tree


def newcomers(pulls, rng, count, noise=1.0):
    own = np.arange(count) % len(pulls)
    return own, (pulls[own] + noise * rng.normal(size=(count, pulls.shape[1]))).astype(np.float32)


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


def vector(*entries):
    return np.array(entries, dtype=np.float32)


EAST, NORTH, WEST, SOUTH = vector(1, 0), vector(0, 1), vector(-1, 0), vector(0, -1)
