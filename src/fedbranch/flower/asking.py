"""Messages to clients: the server's tasks, and models to evaluate."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedbranch.flower.arrays import NamedArrays
from fedbranch.flower.federation import Federation
from fedbranch.flower.half_updates import HALVES_KEY
from fedbranch.protocol.tasks import Task

__all__ = ["Asked", "SentModel", "ask_to_evaluate", "ask_to_train", "write_content"]

# A message to train lives longer than its round: a late reply is of use if its cluster holds.
TRAINING_LIFETIME = 2.0  # times the timeout


@dataclass(frozen=True, kw_only=True, eq=False)
class SentModel:
    """The model that all clients at one position are sent in a round.

    Attributes
    ----------
    position
        The tree node at which these clients stand.
    is_at_leaf
        Whether that node is a leaf.
    arrays
        The model in the message.
    base
        The name of these parameters; a reply goes to the server with it.
    halves
        The number that names the half updates that were asked for; None: none were.
    """

    position: int
    is_at_leaf: bool
    arrays: NamedArrays
    base: str
    halves: int | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A message to a client.

    Attributes
    ----------
    client_id, node_id
        The receiver, and Flower's id of its node.
    round
        The round in which the message was sent.
    model
        The model in the message.
    message
        The message; Flower sets its id when it is sent.
    """

    client_id: str
    node_id: int
    round: int
    model: SentModel
    message: Message

    @property
    def id(self) -> str:
        """The id that a reply refers to; known once the message was sent."""
        return self.message.metadata.message_id

    @property
    def has_expired(self) -> bool:
        """Return whether Flower would no longer pass on a reply."""
        metadata = self.message.metadata
        return metadata.created_at + metadata.ttl < time.time()


def ask_to_train(
    federation: Federation,
    tasks: Mapping[str, Task],
    this_round: int,
    config: ConfigRecord | None = None,
    *,
    with_halves: bool = False,
) -> list[Asked]:
    """Write a message for every task of the server's plan.

    Parameters
    ----------
    federation
        The federation; all these clients are connected.
    tasks
        Client id -> task, as :meth:`fedbranch.Server.plan` returns them.
    this_round
        The number of the round.
    config
        What the client apps find in their configuration, beside ``server-round``.
    with_halves
        Pass on the server's requests for half updates.
    """
    layout = federation.layout
    models: dict[int, SentModel] = {}
    for task in tasks.values():
        if task.node_id not in models:
            models[task.node_id] = SentModel(
                position=task.node_id,
                is_at_leaf=task.purpose == "train",
                arrays=layout.arrays_at(task.params, task.buffers),
                base=task.base,
                halves=task.halves if with_halves else None,
            )
    return _written(
        federation,
        {client_id: models[task.node_id] for client_id, task in tasks.items()},
        this_round,
        config,
        message_type=MessageType.TRAIN,
        ttl_s=TRAINING_LIFETIME * federation.timeout_s,
    )


def ask_to_evaluate(
    federation: Federation,
    client_ids: Iterable[str],
    this_round: int,
    config: ConfigRecord | None = None,
) -> list[Asked]:
    """Write a message to each of these clients, to evaluate the model of its position."""
    tree = federation.server.tree
    positions = {client_id: tree.position(client_id) for client_id in client_ids}
    models: dict[int, SentModel] = {}
    for position in positions.values():
        if position not in models:
            node = tree[position]
            models[position] = SentModel(
                position=position,
                is_at_leaf=node.is_leaf,
                arrays=federation.layout.arrays_at(node.params, node.buffers),
                base=node.base,
            )
    return _written(
        federation,
        {client_id: models[position] for client_id, position in positions.items()},
        this_round,
        config,
        message_type=MessageType.EVALUATE,
        ttl_s=federation.timeout_s,
    )


def _written(
    federation: Federation,
    models: Mapping[str, SentModel],
    this_round: int,
    config: ConfigRecord | None,
    *,
    message_type: str,
    ttl_s: float,
) -> list[Asked]:
    """Write the messages. All clients at a position get one record, which Flower stores once."""
    contents: dict[int, RecordDict] = {}
    asked = []
    for client_id, model in models.items():
        if model.position not in contents:
            halves = {} if model.halves is None else {HALVES_KEY: model.halves}
            contents[model.position] = write_content(
                federation, model.arrays, this_round, config, halves
            )
        node_id = federation.roster.node_ids[client_id]
        message = Message(
            content=contents[model.position],
            message_type=message_type,
            dst_node_id=node_id,
            ttl=ttl_s,
            group_id=str(this_round),
        )
        asked.append(
            Asked(
                client_id=client_id,
                node_id=node_id,
                round=this_round,
                model=model,
                message=message,
            )
        )
    return asked


def write_content(
    federation: Federation,
    arrays: NamedArrays,
    this_round: int,
    config: ConfigRecord | None,
    more: Mapping[str, int | str],
) -> RecordDict:
    """Put a model and its configuration into a record, under the names that clients expect."""
    settings = ConfigRecord({**(config or {}), "server-round": this_round, **more})
    return RecordDict(
        {federation.keys.arrays: federation.layout.record(arrays), federation.keys.config: settings}
    )
