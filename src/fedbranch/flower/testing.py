"""A Flower grid in memory, for tests of strategies and of client apps.

It runs the client app in this process, message by message. It can also do on purpose what a
network does by accident: nodes come and go, replies are late, lost or changed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

# Message() asks Flower for the run that this process belongs to. No public function declares that
# it belongs to none.
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["FakeGrid", "FakeNode"]

SERVER_NODE_ID = 1


@dataclass(frozen=True, kw_only=True)
class FakeNode:
    """A node of a :class:`FakeGrid`.

    Attributes
    ----------
    node_id
        Flower's id of the node.
    config
        The client app finds it in ``context.node_config``.
    public_key, registered_at, last_activated_at, name
        Its identity, and since when it is connected; see :mod:`fedbranch.flower.node_ids`.
    """

    node_id: int
    config: UserConfig = field(default_factory=dict)
    public_key: bytes = b""
    registered_at: str = ""
    last_activated_at: str = ""
    name: str = ""

    @classmethod
    def simulated(cls, partition_id: int, num_partitions: int) -> FakeNode:
        """Make a node like those of Flower's simulation engine."""
        return cls(
            node_id=10_000 + (partition_id * 7919) % 9973,  # in another order than partitions
            config={"partition-id": partition_id, "num-partitions": num_partitions},
            public_key=partition_id.to_bytes(32),
            registered_at=f"2026-01-01T00:00:00.{partition_id:06d}+00:00",
        )


class FakeGrid(Grid):
    """Nodes in this process, each of which runs the client app.

    Parameters
    ----------
    client_app
        The app that every node runs.
    nodes
        The nodes that are connected at first.
    run_config
        The client app finds it in ``context.run_config``.
    on_reply
        Called with a message and the node's reply to it; what it returns is what arrives:
        another reply, several, or none.

    Attributes
    ----------
    sent
        All messages pushed so far.
    errors
        What the client app raised; the strategy only gets a reply with the error.
    """

    def __init__(
        self,
        client_app: ClientApp,
        nodes: Iterable[FakeNode],
        *,
        run_config: UserConfig | None = None,
        on_reply: Callable[[Message, Message], Message | list[Message] | None] | None = None,
    ) -> None:
        self.client_app = client_app
        self.nodes = {node.node_id: node for node in nodes}
        self.run_config = run_config or {}
        self.on_reply = on_reply
        self.sent: list[Message] = []
        self.errors: list[Exception] = []
        self._contexts: dict[int, Context] = {}
        self._replies: list[Message] = []
        self._numbers = itertools.count(1)
        TaskIdentity.run_id, TaskIdentity.task_id = 1, 1
        TaskIdentity.node_id = SERVER_NODE_ID

    def connect(self, node: FakeNode) -> None:
        """Connect a node, for the first time or again."""
        self.nodes[node.node_id] = node

    def disconnect(self, node_id: int) -> FakeNode:
        """Disconnect a node, and return it."""
        return self.nodes.pop(node_id)

    # The interface of Flower's grid

    def set_run(self, run: object) -> None:
        """Accept any run; there is only one."""

    @property
    def run(self) -> Any:  # noqa: D102 -- Flower's type for it is not public
        raise NotImplementedError("a FakeGrid belongs to no run")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the ids of the connected nodes."""
        return list(self.nodes)

    def get_nodes(self) -> list[Any]:
        """Return the connected nodes."""
        return list(self.nodes.values())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Let the nodes answer messages; the replies wait to be pulled."""
        message_ids = []
        for message in messages:
            message_id = f"message-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = message_id  # as Flower's own grids do
            message_ids.append(message_id)
            self.sent.append(message)
            reply = self._answer(message)
            if self.on_reply is not None:
                changed = self.on_reply(message, reply)
                replies = changed if isinstance(changed, list) else [changed]
            else:
                replies = [reply]
            self._replies += [reply for reply in replies if reply is not None]
        return message_ids

    def _answer(self, message: Message) -> Message:
        node = self.nodes.get(message.metadata.dst_node_id)
        if node is None:
            return Message(Error(code=3, reason="Node Unavailable"), reply_to=message)
        context = self._contexts.setdefault(
            node.node_id,
            Context(
                run_id=1,
                node_id=node.node_id,
                node_config=node.config,
                state=RecordDict(),
                run_config=self.run_config,
            ),
        )
        try:
            return self.client_app(copy.deepcopy(message), context)
        except Exception as error:
            self.errors.append(error)
            reason = f"{type(error)}:<'{error}'>"
            return Message(Error(code=2, reason=reason), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to these messages that have arrived."""
        wanted = set(message_ids)
        arrived = [r for r in self._replies if r.metadata.reply_to_message_id in wanted]
        self._replies = [r for r in self._replies if r not in arrived]
        return arrived

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002 -- every node answers at once
    ) -> list[Message]:
        """Let the nodes answer messages, and return the replies."""
        return self.pull_messages(self.push_messages(messages))
