"""Secrets: nothing shows the key, and purposes are independent."""

import pickle

import pytest

from fedbranch.privacy import Rotation, Secret

SECRET = Secret(bytes(range(32)), run="test")


def test_nothing_that_prints_a_secret_shows_its_key():
    key = bytes(range(32))
    shown = f"{SECRET!r} {SECRET!s} {[SECRET]} {Rotation(SECRET, 3, 'test')}"

    assert key.hex() not in shown
    assert repr(key)[2:-1] not in shown


def test_secrets_are_equal_if_key_run_and_epoch_are():
    assert Secret(SECRET.key, "test") == SECRET
    assert hash(Secret(SECRET.key, "test")) == hash(SECRET)
    assert Secret(SECRET.key, "test", epoch=2) != SECRET
    assert Secret(bytes(32), "test") != SECRET
    assert SECRET != "a secret"


def test_a_secret_is_not_pickled():
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(SECRET)


def test_fresh_secrets_differ():
    assert Secret.new("run").key != Secret.new("run").key


def test_purposes_are_independent():
    # "run a, purpose b" must not be the same as "run ab, purpose": lengths are part of the name.
    assert Secret(SECRET.key, "a").derived("bc") != Secret(SECRET.key, "ab").derived("c")
    assert SECRET.derived("one") != SECRET.derived("two")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"key": b"short"}, "5 bytes; it must be 32 bytes"),
        ({"key": "a" * 32}, "the key is a str"),
        ({"run": ""}, "a name that no other run has"),
        ({"run": 7}, "run is 7"),
        ({"epoch": 0}, "epoch is 0"),
        ({"epoch": 1.0}, "epoch is 1.0"),
        ({"epoch": True}, "epoch is True"),
    ],
)
def test_wrong_secrets_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Secret(**{"key": bytes(32), "run": "r", "epoch": 1} | wrong)
