"""Presence by hand; tests/population/test_positions.py compares it with a dict."""

from fedbranch.population import ROUNDS_UNTIL_AWAY, Positions, Presence


def test_a_client_that_leaves_and_returns_was_seen_when_it_returned():
    positions = Positions()
    presence = Presence(positions)
    positions.place_all(["a", "b"], 0)
    presence.mark(["a"], 1)
    positions.remove(["b"])
    positions.place("b", 0)
    presence.mark(["a"], 5)

    presence.count_out(14)
    assert not positions.is_away("b")
    presence.count_out(15)
    assert positions.is_away("a")
    assert positions.is_away("b")


def test_a_client_is_away_after_ten_rounds_without_it():
    positions = Positions()
    presence = Presence(positions)
    positions.place_all(["a", "b"], 0)
    presence.mark(["a", "b"], 1)
    presence.mark(["a"], 2)

    presence.count_out(ROUNDS_UNTIL_AWAY)
    assert positions.num_away(0) == 0
    presence.count_out(ROUNDS_UNTIL_AWAY + 1)
    assert (positions.is_away("a"), positions.is_away("b")) == (False, True)
    assert positions.members([0], away=False) == ["a"]
    presence.mark(["b"], ROUNDS_UNTIL_AWAY + 1)
    assert not positions.is_away("b")


def test_no_client_is_away_before_the_first_mark():
    positions = Positions()
    presence = Presence(positions)
    positions.place_all(["a"], 0)

    presence.count_out(100)

    assert not positions.is_away("a")
