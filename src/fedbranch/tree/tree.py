"""The parameter tree: every cluster with its model, and where every client stands.

A leaf holds a model in training. An inner node holds the frozen stationary solution θ* at
which its cluster split, and the edges to its children hold the updates, computed at
exactly θ*, by which it was split. Parameters are stored as displacements θ − θ0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedbranch.errors import DamagedFile
from fedbranch.population import Positions
from fedbranch.storage.checkpoint import Tensors, read_checkpoint, write_checkpoint
from fedbranch.tree.caches import InMemory, cache_to_state, restored_cache
from fedbranch.tree.descent import Descent, descents
from fedbranch.tree.edge import Edge, EdgeCache, make_edge
from fedbranch.tree.node import Node, read_only
from fedbranch.tree.saved_nodes import check_nodes, nodes_from_state, nodes_to_state
from fedbranch.types import JSON, Array, Vector

__all__ = ["ParameterTree"]


class ParameterTree:
    """The clusters that were found, from the whole population down to the leaves.

    Parameters
    ----------
    num_params
        Length of the parameter vector.
    num_buffers
        Length of the vector of averaged but never compared values (BatchNorm statistics).
    cache
        How edges keep the updates that newcomers are compared with: :class:`InMemory`,
        :class:`Sketched`, :class:`OnDisk`, or an object of your own with the methods of
        :class:`fedbranch.tree.EdgeCache`.

    Attributes
    ----------
    positions
        The node of every client, for questions about many clients at once.

    Notes
    -----
    Every client has exactly one position. At a leaf it trains; at an inner node it is on
    its way down. Node ids count up from 0, the root, and are never used again.

    Examples
    --------
    >>> tree = ParameterTree(num_params=2)
    >>> for client_id in "abc":
    ...     tree.place(client_id, tree.root.id)
    >>> east, west = np.float32([1, 0]), np.float32([-1, 0])
    >>> tree.split(0, [{"a": east, "b": east}, {"c": west}])
    (1, 2)
    >>> tree.members(1), tree.members(2)
    (['a', 'b'], ['c'])
    >>> tree.descend(0, np.float32([-3, 1])).child_id
    2
    """

    def __init__(
        self, num_params: int, num_buffers: int = 0, *, cache: EdgeCache | None = None
    ) -> None:
        num_params, num_buffers = operator.index(num_params), operator.index(num_buffers)
        if num_params < 1 or num_buffers < 0:
            raise ValueError(
                f"num_params is {num_params} and num_buffers {num_buffers}; a model has at least "
                "one parameter and no negative number of buffers"
            )
        cache = InMemory() if cache is None else cache
        if isinstance(cache, type) or not isinstance(cache, EdgeCache):
            raise TypeError(
                f"cache is {cache!r}; pass InMemory(), Sketched(size=...), OnDisk(folder=...) or "
                "an object with the methods of fedbranch.tree.EdgeCache"
            )
        cache.prepare()  # if edges cannot be kept, better an error now than at a split
        self.num_params = num_params
        self.num_buffers = num_buffers
        self.cache = cache
        root = Node(
            id=0,
            parent_id=None,
            params=np.zeros(num_params, dtype=np.float32),
            buffers=np.zeros(num_buffers, dtype=np.float32),
            born_in_round=0,
        )
        self._nodes = {0: root}
        self._next_id = 1
        self.positions = Positions()

    def __getitem__(self, node_id: int) -> Node:
        try:
            return self._nodes[node_id]
        except KeyError:
            raise ValueError(
                f"there is no node {node_id}; the nodes are {list(self._nodes)}"
            ) from None

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def root(self) -> Node:
        """The node of the whole population, where plain federated learning ended."""
        return self._nodes[0]

    @property
    def leaves(self) -> list[Node]:
        """The clusters in training, by id."""
        return [node for node in self if node.is_leaf]

    def path(self, node_id: int) -> list[Node]:
        """Return the nodes from the root to a node: its models from general to specific."""
        node: Node | None = self[node_id]
        nodes = []
        while node is not None:
            nodes.append(node)
            node = None if node.parent_id is None else self[node.parent_id]
        return nodes[::-1]

    # Clients and their positions

    @property
    def client_ids(self) -> list[str]:
        """All clients with a position, sorted."""
        return self.positions.client_ids

    def __contains__(self, client_id: str) -> bool:
        return client_id in self.positions

    def position(self, client_id: str) -> int:
        """Return the id of the node at which a client stands."""
        node_id = self.positions.of(client_id)
        if node_id is None:
            raise ValueError(f"client {client_id!r} has no position; place it at the root first")
        return node_id

    def place(self, client_id: str, node_id: int) -> None:
        """Put a client at a node, from wherever it was."""
        self.positions.place(client_id, self[node_id].id)

    def remove(self, client_id: str) -> None:
        """Forget a client's position. Its cached updates stay: they describe the branch."""
        self.positions.remove([client_id])

    def members(self, node_id: int) -> list[str]:
        """List the clients that stand at exactly this node, sorted."""
        return self.positions.members([self[node_id].id])

    def num_members(self, node_id: int) -> int:
        """Count the clients that stand at exactly this node."""
        return self.positions.num_members(self[node_id].id)

    def cluster(self, node_id: int) -> list[str]:
        """List the clients that stand at this node or below it (the paper's c_v), sorted."""
        return self.positions.members([node.id for node in self.subtree(node_id)])

    def subtree(self, node_id: int) -> list[Node]:
        """List a node and all nodes below it, parents before their children."""
        nodes = [self[node_id]]
        for node in nodes:  # grows while we walk over it
            nodes.extend(self[child_id] for child_id in node.child_ids)
        return nodes

    def leaves_below(self, node_id: int) -> list[Node]:
        """List the leaves at or below a node, by id."""
        return sorted(
            (node for node in self.subtree(node_id) if node.is_leaf), key=lambda node: node.id
        )

    # Changes

    def advance(
        self, node_id: int, params_step: Vector, buffers_step: Vector | None = None
    ) -> None:
        """Move a leaf's parameters by a step."""
        node = self._leaf(node_id)
        node.params = node.params + params_step
        if buffers_step is not None:
            node.buffers = node.buffers + buffers_step
        node.version += 1

    def split(
        self,
        node_id: int,
        groups: Sequence[Mapping[str, Array | None]],
        *,
        in_round: int = 0,
    ) -> tuple[int, ...]:
        """Turn a leaf into an inner node with one child for each group.

        Parameters
        ----------
        node_id
            A leaf. Its parameters are from now on frozen: the stationary solution θ*.
        groups
            For each child, the clients that go there with their updates computed at the
            leaf's current parameters, which stay on the edge. A client without an update (None)
            goes there too, but newcomers cannot be compared with it. Or the edges that
            :meth:`prepared_edges` made of such groups.
        in_round
            The round in which the split happens.

        Returns
        -------
        tuple of int
            Ids of the children, in the order of the groups. They start from θ*.

        Notes
        -----
        Clients that stand at the node and are in no group stay; they are routed later.
        """
        node = self._leaf(node_id)
        if len(groups) < 2:
            raise ValueError(f"got {len(groups)} groups; a split makes at least two")
        num_named = sum(len(group) for group in groups)
        if len({client_id for group in groups for client_id in group}) != num_named:
            raise ValueError("a client is in two groups; the groups of a split are disjoint")
        edges = self.prepared_edges(groups)
        child_ids = []
        for group, edge in zip(groups, edges, strict=True):
            child = Node(
                id=self._next_id,
                parent_id=node_id,
                params=node.params.copy(),
                buffers=node.buffers.copy(),
                born_in_round=in_round,
                cached_updates=edge,
            )
            self._next_id += 1
            self._nodes[child.id] = child
            child_ids.append(child.id)
            self.positions.place_all(list(group), child.id)
        node.child_ids = tuple(child_ids)
        node.split_in_round = in_round
        return node.child_ids

    def prepared_edges(self, groups: Sequence[Mapping[str, Array | None]]) -> list[Edge]:
        """Make the edges of a split; if that fails, nothing of them is left.

        The tree itself does not change.

        Raises
        ------
        ValueError
            If the updates are not vectors of the length of all others that are kept.
        CannotWrite
            If edges are on disk, and that is full or refuses.
        """
        edges: list[Edge] = []
        try:
            for group in groups:
                edge = group if isinstance(group, Edge) else make_edge(self.cache, group)
                edges.append(edge)  # one by one, so that a failure discards those before
            dims = {edge.dim for edge in (*edges, *self._edges()) if edge}
            if len(dims) > 1:
                raise ValueError(
                    f"the updates have lengths {sorted(dims)}; all that a tree compares are "
                    "equally long"
                )
        except BaseException:
            for edge in edges:
                edge.discard()
            raise
        return edges

    def _edges(self) -> Iterator[Edge]:
        return (node.cached_updates for node in self)

    def undo_split(self, node_id: int) -> None:
        """Make an inner node a leaf again: back to θ*, with all clients from below it."""
        node = self[node_id]
        if node.is_leaf:
            raise ValueError(f"node {node_id} is a leaf; there is no split to undo")
        gone_ids = [gone.id for gone in self.subtree(node_id)[1:]]
        self.positions.move_all(gone_ids, node_id)
        for gone_id in gone_ids:
            self._nodes[gone_id].cached_updates.discard()
            del self._nodes[gone_id]
        node.become_leaf()

    # Assigning new clients

    def can_route(self, node_id: int) -> bool:
        """Return whether every edge below an inner node has cached updates to compare with."""
        return all(self[child_id].cached_updates for child_id in self[node_id].child_ids)

    def descend(
        self, node_id: int, update: Array, *, ignored_share: float = 0.0, num_best: int = 1
    ) -> Descent:
        """Choose the child whose cached pre-split updates are most similar to an update.

        Parameters
        ----------
        node_id
            An inner node.
        update
            Computed at that node's parameters; as long as the cached ones.
        ignored_share
            Share of a child's cached updates, the most similar ones, that does not count; rounded
            to whole updates. The paper's algorithm ignores none, so one poisoned update can
            attract all newcomers.
        num_best
            The similarity to a child is the mean over this many of the most similar updates that
            count, or over all if there are fewer. The paper takes the largest.

        Returns
        -------
        Descent
            Of equally similar children, the first.
        """
        (descent,) = self.descend_all(
            node_id, update[None, :], ignored_share=ignored_share, num_best=num_best
        )
        return descent

    def descend_all(
        self, node_id: int, updates: Array, *, ignored_share: float = 0.0, num_best: int = 1
    ) -> list[Descent]:
        """Choose a child for many clients, as :meth:`descend` does, with one product for each.

        Parameters
        ----------
        node_id
            An inner node.
        updates
            Shape (num_clients, dim).
        ignored_share, num_best
            As for :meth:`descend`.

        Returns
        -------
        list of Descent
            In the order of the rows.
        """
        if self[node_id].is_leaf or not self.can_route(node_id):
            raise ValueError(
                f"node {node_id} has no edges with cached updates; only a client at a split "
                "made from updates can be routed"
            )
        edges = {child_id: self[child_id].cached_updates for child_id in self[node_id].child_ids}
        return descents(edges, self.cache, updates, ignored_share=ignored_share, num_best=num_best)

    def num_compared(self, dim: int) -> int:
        """Count the numbers by which updates of length ``dim`` are compared on edges."""
        return self.cache.num_kept(dim)

    def assign(self, train: Callable[[Vector], Vector]) -> int:
        """Walk a new client from the root to a leaf (the paper's "Assigning new Clients").

        Parameters
        ----------
        train
            Maps a node's parameters θ − θ0 to the client's update there.

        Returns
        -------
        int
            Id of the leaf. The client is not placed.
        """
        node = self.root
        while not node.is_leaf:
            node = self[self.descend(node.id, train(read_only(node.params))).child_id]
        return node.id

    def _leaf(self, node_id: int) -> Node:
        node = self[node_id]
        if not node.is_leaf:
            raise ValueError(f"node {node_id} is not a leaf; an inner node's parameters are frozen")
        return node

    # Files

    def save(self, folder: str | Path) -> None:
        """Write the tree to a folder (JSON and safetensors), replacing what was saved there."""
        state, files = self.to_state()
        write_checkpoint(Path(folder), "tree", state, files)

    @classmethod
    def load(cls, folder: str | Path, *, cache: EdgeCache | None = None) -> ParameterTree:
        """Read a tree that :meth:`save` wrote.

        Parameters
        ----------
        folder
            Where it was saved.
        cache
            How edges keep updates from now on; by default as they did. Edges that were on disk
            are read where they were saved, and new ones go to ``edges`` in that folder. Needed
            if the saved cache was the user's own.
        """
        state, files = read_checkpoint(Path(folder), "tree")
        cache = restored_cache(state, given=cache, folder=Path(folder))
        return cls.from_state(state, files, cache=cache)

    def to_state(self) -> tuple[JSON, dict[str, Tensors]]:
        """Describe the tree as JSON and tensors, for a checkpoint."""
        nodes, files = nodes_to_state(self)
        clients, of_clients = self.positions.to_state()
        state: JSON = {
            "cache": cache_to_state(self.cache),
            "num_compared": next((edge.dim for edge in self._edges() if edge), None),
            "num_params": self.num_params,
            "num_buffers": self.num_buffers,
            "next_id": self._next_id,
            "nodes": nodes,
            "clients": clients,
        }
        return state, files | of_clients

    @classmethod
    def from_state(
        cls,
        state: JSON,
        files: Mapping[str, Tensors],
        *,
        cache: EdgeCache | None = None,
    ) -> ParameterTree:
        """Rebuild a tree from what :meth:`to_state` returned."""
        try:
            tree = cls(state["num_params"], state["num_buffers"])
            tree.cache = restored_cache(state) if cache is None else cache
            tree._nodes = nodes_from_state(
                state["nodes"],
                files,
                tree.cache,
                num_compared=state.get("num_compared"),  # not in states of older versions
            )
            tree._next_id = state["next_id"]
            tree.positions = Positions.from_state(state["clients"], files, tree._nodes)
            tree.check()
        except (KeyError, TypeError, ValueError, AttributeError, MemoryError) as error:
            raise DamagedFile(f"the saved tree contradicts itself: {error!r}") from error
        return tree

    def check(self) -> None:
        """Raise an error unless the nodes form one tree of equally long vectors.

        Raises
        ------
        KeyError, ValueError
            If they do not.
        """
        check_nodes(
            self._nodes,
            next_id=self._next_id,
            num_params=self.num_params,
            num_buffers=self.num_buffers,
        )
