import hashlib
from functools import cache

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedbranch.flower import client_id_of_key
from fedbranch.flower.node_ids import identify
from fedbranch.flower.testing import FakeNode


@cache
def public_key(name):
    return ec.generate_private_key(ec.SECP384R1()).public_key()


def pem(name):
    return public_key(name).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def keyed(node_id, key, **more):
    return FakeNode(node_id=node_id, public_key=pem(key), **more)


def test_a_client_is_the_fingerprint_of_its_key():
    roster = identify([keyed(5, "a"), keyed(6, "b")])

    assert roster.node_ids == {client_id_of_key(pem("a")): 5, client_id_of_key(pem("b")): 6}
    der = public_key("a").public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert client_id_of_key(pem("a")) == "key-" + hashlib.sha256(der).hexdigest()[:32]


def test_a_key_written_otherwise_is_the_same_client():
    as_ssh_writes_it = public_key("a").public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)

    assert client_id_of_key(as_ssh_writes_it + b" name@host\n") == client_id_of_key(pem("a"))
    assert client_id_of_key(b"\n" + pem("a").replace(b"\n", b"\r\n")) == client_id_of_key(pem("a"))


def test_a_client_keeps_its_id_under_another_node_id():
    before, after = identify([keyed(5, "a")]), identify([keyed(99, "a")])

    assert before.node_ids.keys() == after.node_ids.keys()


def test_the_configuration_of_a_node_does_not_change_its_id():
    claims = {"partition-id": 0}

    roster = identify([keyed(5, "a", config=claims), keyed(6, "b", config=claims)])

    assert len(roster.node_ids) == 2
    assert not roster.refused


def test_one_key_on_two_nodes_is_refused_for_both():
    roster = identify([keyed(5, "a"), keyed(6, "a"), keyed(7, "b")])

    assert list(roster.node_ids.values()) == [7]
    assert roster.refused == {client_id_of_key(pem("a")): "one key on several nodes: [5, 6]"}


def test_two_keys_on_one_node_are_refused_both():
    roster = identify([keyed(5, "a"), keyed(5, "b"), keyed(7, "c")])

    assert list(roster.node_ids.values()) == [7]
    assert len(roster.refused) == 2
    assert all("node 5 has several keys" in reason for reason in roster.refused.values())


def test_a_node_that_is_listed_twice_is_one_client():
    assert identify([keyed(5, "a"), keyed(5, "a")]).node_ids == {client_id_of_key(pem("a")): 5}


def test_in_a_simulation_the_client_is_its_partition():
    nodes = [FakeNode.simulated(i, 12) for i in (11, 2, 0, 10, 1, 3, 4, 5, 6, 7, 8, 9)]

    roster = identify(nodes)

    assert list(roster.node_ids) == [f"partition-{i:04d}" for i in range(12)]
    assert roster.node_ids["partition-0010"] == FakeNode.simulated(10, 12).node_id


def test_a_simulated_node_that_is_gone_leaves_its_place_free():
    nodes = [FakeNode.simulated(i, 4) for i in range(4)]
    before = identify(nodes[:3])

    roster = identify(nodes[1:], before)

    assert list(roster.node_ids) == ["partition-0001", "partition-0002", "partition-0003"]
    assert roster.node_ids["partition-0001"] == nodes[1].node_id


def test_nodes_without_any_key_keep_flowers_id():
    nodes = [FakeNode(node_id=7, registered_at="b"), FakeNode(node_id=8, registered_at="a")]

    assert identify(nodes).node_ids == {"node-7": 7, "node-8": 8}


@pytest.mark.parametrize(
    "key", [b"", b"ssh-ed25519 AAAA", b"-----BEGIN PUBLIC KEY-----\n!!!\n-----END PUBLIC KEY-----"]
)
def test_a_text_that_is_no_public_key_is_an_error(key):
    with pytest.raises(ValueError, match="not a public key"):
        client_id_of_key(key)


def test_a_key_that_cannot_be_read_costs_its_node_only():
    broken = FakeNode(node_id=5, public_key=b"-----BEGIN CERTIFICATE-----")

    roster = identify([broken, keyed(6, "b")])

    assert list(roster.node_ids.values()) == [6]
    assert "not a public key" in roster.refused["node-5"]


def test_a_key_of_many_bytes_is_refused_unread():
    endless = FakeNode(node_id=5, public_key=b"-----BEGIN PUBLIC KEY-----" + b"A" * 20_000)

    roster = identify([endless, keyed(6, "b")])

    assert list(roster.node_ids.values()) == [6]
    assert roster.refused == {"node-5": "a public key of 20,026 bytes"}


@pytest.mark.parametrize(
    "name", ["Clinic", " clinic ", f"key-{'0' * 32}", "node-7", "clinic\x1b[2J", "x" * 101]
)
def test_a_name_that_could_be_mistaken_is_left_out(name):
    roster = identify([keyed(5, "a", name="clinic"), keyed(6, "b", name=name)])

    assert client_id_of_key(pem("b")) not in roster.names
    assert len(roster.node_ids) == 2  # its id follows from its key alone


def test_distinct_names_are_kept():
    roster = identify([keyed(5, "a", name="clinic"), keyed(6, "b", name="Klinik Süd")])

    assert sorted(roster.names.values()) == ["Klinik Süd", "clinic"]
