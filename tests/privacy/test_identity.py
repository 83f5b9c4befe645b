"""Identities and rosters."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fedbranch.errors import NotInRoster
from fedbranch.privacy import Identity, Roster


def test_an_identity_survives_its_file():
    identity = Identity.new()

    for password in (None, b"a password"):
        again = Identity.from_pem(identity.to_pem(password), password)
        assert again.fingerprint == identity.fingerprint
        assert again.public_bytes == identity.public_bytes


@pytest.mark.parametrize(
    ("password", "given"), [(b"right", b"wrong"), (b"right", None), (None, b"any")]
)
def test_a_wrong_password_is_a_value_error(password, given):
    with pytest.raises(ValueError, match="the identity cannot be read"):
        Identity.from_pem(Identity.new().to_pem(password), given)


def test_another_kind_of_key_is_no_identity():
    key = X25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    with pytest.raises(ValueError, match="it must be an Ed25519 key"):
        Identity.from_pem(pem)
    with pytest.raises(ValueError, match="the identity cannot be read"):
        Identity.from_pem(b"nothing")


def test_a_roster_is_named_by_all_that_it_says():
    a, b, c = ("a" * 64, "b" * 64, "c" * 64)
    rosters = [
        Roster("run", {a, b}),
        Roster("other", {a, b}),
        Roster("run", {a, b}, epoch=2),
        Roster("run", {a, c}),
        Roster("run", {a, b, c}),
    ]

    assert len({roster.digest for roster in rosters}) == len(rosters)
    assert Roster("run", [b, a]).digest == rosters[0].digest


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"run": ""}, "0 bytes"),
        ({"run": "r" * 201}, "201 bytes"),
        ({"epoch": 0}, "epoch is 0"),
        ({"epoch": 2**64}, "epoch is"),
        ({"members": []}, "no members"),
        ({"members": ["A" * 64]}, "is no fingerprint"),
        ({"members": ["a" * 63]}, "is no fingerprint"),
    ],
)
def test_wrong_rosters_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Roster(**{"run": "r", "members": ["a" * 64], "epoch": 1} | wrong)


def test_only_members_are_removed():
    with pytest.raises(ValueError, match="not in the roster"):
        Roster("run", {"a" * 64}).without("b" * 64)


def test_the_lowest_fingerprint_leads():
    names = ["a" * 64, "b" * 64, "c" * 64]
    roster = Roster("test", names)

    assert roster.leader(names[:0:-1]) == names[1]
    assert roster.leader([names[2], "0" * 64]) == names[2]
    with pytest.raises(NotInRoster, match="no member of the roster is present"):
        roster.leader(["0" * 64])


def test_an_added_member_belongs_to_the_next_epoch():
    roster = Roster("test", {"a" * 64}).joined_by("b" * 64)

    assert roster.epoch == 2
    assert set(roster.members) == {"a" * 64, "b" * 64}
