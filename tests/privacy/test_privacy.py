"""The privacy settings; tests/sim/test_privacy.py has what they do in a run."""

from dataclasses import asdict

from fedbranch.privacy import Privacy, Secret


def test_settings_can_be_shown_as_a_dictionary_without_the_key():
    secret = Secret(bytes(range(32)), run="test")

    shown = repr(asdict(Privacy(secret)))

    assert "Secret of run 'test'" in shown
    assert repr(secret.key)[2:-1] not in shown
    assert not hasattr(secret, "__dict__")
