"""The check of edge caches: ours pass, and broken ones are caught."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from fedbranch import Edge, InMemory, OnDisk, Sketched
from fedbranch.core.geometry import to_numpy
from fedbranch.testing import check_edge_cache
from fedbranch.tree import row_blocks


@pytest.mark.parametrize(
    ("cache_in", "error"),
    [
        (lambda folder: InMemory(), {}),
        (lambda folder: OnDisk(folder=folder / "edges"), {}),
        (lambda folder: Sketched(size=128, seed=5), {"error": 0.4}),
    ],
    ids=["memory", "disk", "sketches"],
)
def test_our_caches_keep_their_contract(cache_in, error, tmp_path):
    check_edge_cache(lambda: cache_in(tmp_path), **error)


@dataclass(frozen=True)
class EverySecond:
    """Keep every second number: a cache as a user might write it."""

    def prepare(self):
        pass

    def num_kept(self, dim):
        return -(-dim // 2)

    def compared(self, updates):
        return np.ascontiguousarray(to_numpy(updates)[:, ::2], dtype=np.float32)

    def keep(self, updates):
        dim = len(next(iter(updates.values())))
        rows = [self.compared(block) for block in row_blocks(updates.values(), dim)]
        return Edge(list(updates), np.concatenate(rows), dim=dim)

    def restore(self, saved):
        return saved.in_memory()


def test_a_cache_that_is_not_ours_keeps_the_contract():
    check_edge_cache(EverySecond, error=0.2)


class WithoutRestore:
    def prepare(self):
        pass

    num_kept = compared = keep = prepare


class Unprepared(EverySecond):
    def prepare(self):
        raise OSError("no space left")


class Miscounting(EverySecond):
    def num_kept(self, dim):
        return dim


class Centring(EverySecond):
    """Compare what remains after the mean of the updates: this depends on the others."""

    def compared(self, updates):
        rows = super().compared(updates)
        return rows - rows.mean(axis=0)


@dataclass(frozen=True)
class Unrepeatable(EverySecond):
    """Draw signs anew for each cache."""

    sign: np.ndarray = field(default_factory=lambda: np.random.default_rng().normal(size=999))

    def compared(self, updates):
        rows = super().compared(updates)
        return rows * self.sign[: rows.shape[1]].astype(np.float32)


class Aliasing(InMemory):
    def keep(self, updates):
        dim = len(next(iter(updates.values())))
        first = next(iter(updates.values()))
        edge = super().keep(updates)
        edge._matrix.flags.writeable = True

        class Alias(Edge):
            def __getitem__(self, client_id):
                vector = np.asarray(super().__getitem__(client_id))
                return to_numpy(first) if client_id == next(iter(self)) else vector

        return Alias(list(updates), edge._matrix, dim=dim)


class KeepingWhole(EverySecond):
    """Keep whole updates although it compares half of them."""

    def keep(self, updates):
        return InMemory().keep(updates)


class Sorting(EverySecond):
    def keep(self, updates):
        return super().keep(dict(sorted(updates.items(), reverse=True)))


class Writeable(InMemory):
    def keep(self, updates):
        class Open(Edge):
            def __getitem__(self, client_id):
                return super().__getitem__(client_id).copy()

        edge = super().keep(updates)
        return Open(list(edge), np.stack([edge[i] for i in edge]), dim=edge.dim)


class Unscaled(InMemory):
    def keep(self, updates):
        class Inner(Edge):
            def similarities(self, updates):
                rows = np.stack([self[client_id] for client_id in self])
                return updates.rows @ rows.T

        edge = super().keep(updates)
        return Inner(list(edge), np.stack([edge[i] for i in edge]), dim=edge.dim)


class ComparingAgain(Sketched):
    """Sketch what is a sketch already."""

    def restore(self, saved):
        rows = {
            i: np.float32(row[::-1]) for i, row in zip(saved.client_ids, saved.updates, strict=True)
        }
        edge = saved.in_memory()
        return Edge(list(rows), np.stack(list(rows.values())), dim=edge.dim)


class Shuffling(InMemory):
    def restore(self, saved):
        edge = saved.in_memory()
        ids = list(edge)[::-1]
        return Edge(ids, np.stack([edge[i] for i in ids]), dim=edge.dim)


class Sharing(InMemory):
    """Make edges that all end when one of them is discarded."""

    is_gone = False

    def keep(self, updates):
        class Shared(Edge):
            def __getitem__(self, client_id):
                if Sharing.is_gone:
                    raise FileNotFoundError("the file of this edge is gone")
                return super().__getitem__(client_id)

            def discard(self):
                Sharing.is_gone = True

        edge = super().keep(updates)
        return Shared(list(edge), np.stack([edge[i] for i in edge]), dim=edge.dim)


class Swallowing(InMemory):
    def keep(self, updates):
        try:
            return super().keep(updates)
        except Exception:
            return Edge()


@pytest.mark.parametrize(
    ("make_cache", "clause"),
    [
        (WithoutRestore, r"a cache has the methods of the protocol.*\['restore'\]"),
        (Unprepared, r"prepare\(\), twice returns.*no space left"),
        (Miscounting, r"compared returns float32 of shape \(num_updates, num_kept\(dim\)\)"),
        (Centring, "compared depends on nothing but each update"),
        (Unrepeatable, "caches with the same settings do the same"),
        (Aliasing, "equals the client's row of compared.*after the arrays.*have changed"),
        (KeepingWhole, r"edge\[client_id\] equals the client's row of compared"),
        (Sorting, "an edge has the clients that it was made of, in their order"),
        (Writeable, "what an edge returns is read-only"),
        (Unscaled, "similarities are the cosines of what is compared"),
        (EverySecond, "similarities are the cosines of whole updates, within the error"),
        (lambda: ComparingAgain(size=16), "restore makes an edge with the same numbers"),
        (Shuffling, "restore makes an edge with the same ids, in the same order"),
        (Sharing, "reading an edge after an edge with the same content was discarded returns"),
        (Swallowing, "if updates cannot be read, keep raises their error"),
    ],
)
def test_a_broken_cache_is_caught(make_cache, clause):
    with pytest.raises(AssertionError, match=f"(?s)clause: .*{clause}"):
        check_edge_cache(make_cache)
