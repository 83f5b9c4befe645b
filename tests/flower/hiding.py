"""Federations with hidden models, for tests: their initial model, and a watch on the messages."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord
from flwr.common.serde import message_to_proto

from fedbranch.flower import ClusteredStrategy
from fedbranch.privacy import Secret
from flower.federations import RULE, SEED, make_model

SECRET = Secret(bytes(range(7, 39)), run="test")


def initial(seed):
    return ArrayRecord(make_model(seed % 2**32).state_dict())


def as_record(model):
    if isinstance(model, ArrayRecord):
        return model
    return ArrayRecord({name: Array(array) for name, array in model.items()})


def theta0(make_initial):
    return as_record(make_initial(SECRET.seed("initial model")))


def start(grid, arrays, *, num_rounds=12, strategy_class=ClusteredStrategy, **settings):
    start_with = settings.pop("start_with", {})
    strategy = strategy_class(**{"rule": RULE, "seed": SEED, **settings})
    result = strategy.start(grid, arrays, num_rounds=num_rounds, timeout=5, **start_with)
    assert not grid.errors
    return result


def watching(seen):
    """A mod that writes down the plain models that a client app gets and gives."""

    def mod(message, context, call_next):
        reply = None
        for record in message.content.array_records.values():
            seen.extend(record.to_numpy_ndarrays())
        reply = call_next(message, context)
        for record in reply.content.array_records.values():
            seen.extend(record.to_numpy_ndarrays())
        return reply

    return mod


def overhearing(overheard):
    """Write down every message and reply as the server's side gets them."""

    def on_reply(message, reply):
        overheard.add(*(message_to_proto(one).SerializeToString() for one in (message, reply)))
        return reply

    return on_reply
