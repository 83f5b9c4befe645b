"""A client that claims another's identity is refused, ignored, or a newcomer without a past."""

import unicodedata
from functools import cache

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Error, Message

import fedbranch as fb
from fakes import DIM, QuadraticClients, fingerprint
from fedbranch.flower import client_id_of_key
from fedbranch.flower.testing import FakeGrid, FakeNode
from reliability.quadratic_app import RULE, found_groups, make_app, start

# The server itself


def split_server():
    """Return a server with eight clients in two clusters, and these clients."""
    clients = QuadraticClients(num_groups=2, clients_per_group=4)
    server = fb.Server(DIM, rule=RULE)
    while len(server.clusters) < 2:
        clients.play_round(server, clients.client_ids)
    return server, clients


def replies_of(clients, tasks):
    return [(i, clients.update(i, task)) for i, task in tasks.items()]


def two_replies_under_one_id():
    server, clients = split_server()
    replies = replies_of(clients, server.plan(clients.client_ids))

    record = server.step([*replies, ("c00", replies[1][1])])

    assert "answered 2 times in one round" in record.refused["c00"]
    assert sorted(record.metrics) == clients.client_ids[1:]
    return "refused"


def a_reply_of_a_client_that_was_not_asked():
    server, clients = split_server()
    tasks = server.plan(clients.client_ids[1:])
    update = replies_of(clients, tasks)[0][1]

    record = server.step([*replies_of(clients, tasks), ("c00", fb.Update(update.vector, 10))])

    assert record.refused == {"c00": "no task was planned for this client in this round"}
    return "refused"


def a_reply_of_a_stranger():
    server, clients = split_server()
    replies = replies_of(clients, server.plan(clients.client_ids))

    record = server.step([*replies, ("stranger", replies[0][1])])

    assert "unknown client" in record.refused["stranger"]
    return "refused"


def an_old_reply_once_more():
    server, clients = split_server()
    old = dict(replies_of(clients, server.plan(clients.client_ids)))
    server.step(old)
    replies = dict(replies_of(clients, server.plan(clients.client_ids)))

    record = server.step({**replies, "c00": old["c00"]})

    assert "computed at other parameters" in record.refused["c00"]
    return "refused"


def a_reply_for_another_cluster():
    server, clients = split_server()
    tasks = server.plan(clients.client_ids)
    replies = dict(replies_of(clients, tasks))

    record = server.step({**replies, "c00": clients.update("c00", tasks["c01"])})

    assert "computed at other parameters" in record.refused["c00"]
    return "refused"


def an_id_that_looks_the_same(known, other):
    """Join under an id that only looks like another's: the client begins at the root."""
    server, clients = split_server()
    server.join([known], node_id=server.tree.position("c00"))
    before = server.tree.position(known)

    task = server.plan([other])[other]
    record = server.step({other: clients.update("c01", task)})

    assert record.joined == (*sorted([known, other]),)
    assert task.purpose == "route"
    assert server.tree.position(known) == before != server.tree.position(other)
    return "newcomer"


def another_case():
    return an_id_that_looks_the_same("klinik", "Klinik")


def another_way_to_write_an_accent():
    composed = unicodedata.normalize("NFC", "müller")
    return an_id_that_looks_the_same(composed, unicodedata.normalize("NFD", composed))


def an_id_that_is_refused(other):
    server, clients = split_server()
    before = fingerprint(server)

    with pytest.raises((TypeError, ValueError), match=r"client_ids are|the client id"):
        server.plan([*clients.client_ids, other])

    assert fingerprint(server) == before
    return "refused"


# Over Flower, where the SuperLink knows the key of each node


@cache
def key(name):
    public_key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def node(partition, *, key_of=None, node_id=None, **more):
    return FakeNode(
        node_id=100 + partition if node_id is None else node_id,
        config={"partition-id": partition},
        public_key=key(partition if key_of is None else key_of),
        **more,
    )


def id_of(partition):
    return client_id_of_key(key(partition))


def federation(*more_nodes, num_rounds=15, on_reply=None, change=None, timeout=0.05):
    """Run eight nodes with keys, in two groups; ``change`` alters the grid after ten rounds."""
    grid = FakeGrid(make_app(2), [*(node(i) for i in range(8)), *more_nodes], on_reply=on_reply)
    if change is not None:
        sent = grid.push_messages

        def push_messages(messages):
            messages = list(messages)
            if any(m.metadata.group_id == "10" for m in messages) and grid.nodes:
                change(grid)
            return sent(messages)

        grid.push_messages = push_messages
    return start(grid, num_rounds=num_rounds, timeout=timeout)


def undisturbed_groups():
    return sorted(sorted(id_of(i) for i in range(g, 8, 2)) for g in (0, 1))


def a_copied_key():
    result = federation(node(3, node_id=999))

    for entry in result.history:
        assert entry.record.refused[id_of(3)] == "one key on several nodes: [103, 999]"
        assert id_of(3) not in entry.record.metrics
    return "refused"


def an_answer_to_another_nodes_message():
    def on_reply(message, reply):
        if message.metadata.dst_node_id != 100:
            return reply
        forged = Message(Error(code=2, reason="silenced"), reply_to=message)
        forged.metadata.__dict__["_src_node_id"] = 107
        return [forged, reply]

    result = federation(on_reply=on_reply)

    assert result.history == federation().history
    return "ignored"


def an_answer_twice_over_flower():
    result = federation(on_reply=lambda message, reply: [reply, reply])

    assert result.history == federation().history
    return "ignored"


def an_old_answer_once_more_over_flower():
    kept = []

    def on_reply(message, reply):
        if message.metadata.dst_node_id != 100 or message.metadata.message_type != "train":
            return reply
        kept.append(reply)
        return kept[0] if len(kept) > 1 else reply  # names a message that was answered long ago

    result = federation(on_reply=on_reply, num_rounds=4)

    for entry in result.history[1:]:
        assert "no answer" in entry.record.refused[id_of(0)]
    return "ignored"


def another_nodes_name():
    result = federation(node(8, name=id_of(0)), node(9, name="clinic"), node(10, name="clinic"))

    assert result.names == {}
    return "refused"


def another_nodes_partition():
    result = federation(FakeNode(node_id=999, config={"partition-id": 0}, public_key=key("thief")))

    thief = client_id_of_key(key("thief"))
    assert result.node_ids[id_of(0)] == 100
    assert result.node_ids[thief] == 999
    return "newcomer"


def a_new_key_to_shed_the_past():
    result = federation(change=lambda grid: grid.connect(node(0, key_of="fresh")))

    fresh = client_id_of_key(key("fresh"))
    joined = {i: entry.record.round for entry in result.history for i in entry.record.joined}
    routed = [move for entry in result.history for move in entry.record.routed]
    assert joined[fresh] > joined[id_of(0)]
    assert [move.from_node for move in routed if move.client_id == fresh] == [0]
    # It is where its updates belong, and its former identity keeps its position.
    assert result.assignments[fresh] == result.assignments[id_of(0)] == result.assignments[id_of(2)]
    return "newcomer"


TRICKS = {
    "two replies under one id": two_replies_under_one_id,
    "a reply of a client that was not asked": a_reply_of_a_client_that_was_not_asked,
    "a reply of a stranger": a_reply_of_a_stranger,
    "an old reply once more": an_old_reply_once_more,
    "a reply for another cluster": a_reply_for_another_cluster,
    "another case": another_case,
    "another way to write an accent": another_way_to_write_an_accent,
    "a blank at the end": lambda: an_id_that_is_refused("c00 "),
    "a character of no width": lambda: an_id_that_is_refused("c00\u200b"),
    "half a character": lambda: an_id_that_is_refused("c00\ud83d"),
    "no name": lambda: an_id_that_is_refused(""),
    "a name without end": lambda: an_id_that_is_refused("c" * 10**6),
    "a number for a name": lambda: an_id_that_is_refused(7),
    "a copied key": a_copied_key,
    "an answer to another node's message": an_answer_to_another_nodes_message,
    "an answer twice, over Flower": an_answer_twice_over_flower,
    "an old answer once more, over Flower": an_old_answer_once_more_over_flower,
    "another node's name": another_nodes_name,
    "another node's partition": another_nodes_partition,
    "a new key to shed the past": a_new_key_to_shed_the_past,
}


@pytest.mark.parametrize("trick", TRICKS)
def test_no_client_speaks_for_another_or_keeps_a_stolen_position(trick):
    assert TRICKS[trick]() in ("refused", "ignored", "newcomer")


def test_the_federation_of_these_tricks_finds_its_groups():
    assert found_groups(federation()) == undisturbed_groups()


@pytest.mark.reliability
def test_every_trick_is_refused_ignored_or_makes_a_newcomer(measured):
    outcomes = [trick() for trick in TRICKS.values()]

    count = {outcome: outcomes.count(outcome) for outcome in ("refused", "ignored", "newcomer")}
    assert sum(count.values()) == len(TRICKS)
    measured(
        "identity",
        f"of {len(TRICKS)} tricks {count['refused']} are refused, {count['ignored']} ignored, and "
        f"{count['newcomer']} make a newcomer without a past; none speaks for another client",
    )


def test_a_vector_of_another_client_is_still_the_senders_own():
    """A copy of another client's update cannot be recognised: it counts for its sender."""
    server, clients = split_server()
    tasks = server.plan(clients.client_ids)
    replies = dict(replies_of(clients, tasks))
    replies["c00"] = fb.Update(np.array(replies["c02"].vector), 10, base=tasks["c00"].base)

    record = server.step(replies)

    assert not record.refused
