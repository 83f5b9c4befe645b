"""What replies are judged by: the state of the server in a round."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fedbranch.core.projection import Projection
from fedbranch.errors import InvalidUpdate
from fedbranch.protocol.plain_text import shortened
from fedbranch.server.leaf import Leaf
from fedbranch.server.options import ServerOptions
from fedbranch.server.replies.checks import Expected
from fedbranch.tree import ParameterTree

__all__ = ["Situation"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Situation:
    """How the server stands when the replies of a round begin to come in.

    Attributes
    ----------
    round
        The coming one.
    expected
        What every reply must fit.
    tree
        Where each client stands.
    asked
        Client id -> base of its task.
    leaves
        Leaf -> its phase, memory and replies.
    set_aside
        The clients whose last reply the guard set aside.
    options, projection
        As the server has them.
    standing
        Node -> version of its parameters, and whether it is a leaf.
    """

    round: int
    expected: Expected
    tree: ParameterTree
    asked: Mapping[str, str]
    leaves: Mapping[int, Leaf]
    set_aside: Collection[str]
    options: ServerOptions
    projection: Projection | None
    standing: Mapping[int, tuple[int, bool]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "standing", _standing(self.tree))

    @cached_property
    def _bases(self) -> dict[int, str]:
        return {node.id: node.base for node in self.tree}

    def check_is_present(self, tree: ParameterTree, this_round: int) -> None:
        """Raise ValueError unless this is still the situation of the server with this tree."""
        if self.round != this_round:
            raise ValueError(
                f"the intake is of round {self.round}, and this is round {this_round}; begin one "
                "for every round"
            )
        if self.tree is not tree:
            raise ValueError("the intake is of another server; step the one that it was begun by")
        if _standing(tree) != self.standing:
            raise ValueError(
                "the tree has changed since the intake was begun; begin a new one after undoing or "
                "merging splits"
            )

    def node_of(self, client_id: object) -> int:
        """Look up where the client of a reply stands.

        Raises
        ------
        InvalidUpdate
            If it is not known.
        """
        if not isinstance(client_id, str):
            raise InvalidUpdate(f"unknown client: its id is a {type(client_id).__name__}")
        return self.checked_node(self.tree.positions.of(client_id))

    def checked_node(self, node_id: int | None) -> int:
        """Refuse a client that has no position."""
        if node_id is None:
            raise InvalidUpdate("unknown client: it never joined or has left")
        return node_id

    def check_base(self, client_id: str, base: str | None, node_id: int) -> None:
        """Refuse a reply that does not answer what the client's position asks for now.

        Parameters
        ----------
        client_id
            The client.
        base
            Of the task that it answers; None: of the task that was planned for this round.
        node_id
            Its position.

        Raises
        ------
        InvalidUpdate
            If the reply is late, was not asked for, or is the second one.
        """
        if base is None:
            base = self.asked.get(client_id)
        if base is None:
            raise InvalidUpdate("no task was planned for this client in this round")
        present = self._bases[node_id]
        if not isinstance(base, str) or base != present:
            raise InvalidUpdate(
                f"computed at other parameters ({shortened(base)}) than the client's position has "
                f"now ({present!r})"
            )
        leaf = self.leaves.get(node_id)
        if leaf is not None and leaf.has_reply_of(client_id):
            raise InvalidUpdate("has already answered at these parameters")


def _standing(tree: ParameterTree) -> dict[int, tuple[int, bool]]:
    return {node.id: (node.version, node.is_leaf) for node in tree}
