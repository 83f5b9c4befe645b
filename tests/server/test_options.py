"""What a server can be told, and what it refuses."""

import pytest

from fedbranch import NeverSplit, Server
from fedbranch.core.projection import Projection
from fedbranch.core.robust import median
from server.replies.made_replies import DIM, SIZE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weighting": "size"}, "weighting is 'size'"),
        ({"compare": "gradient"}, "compare is 'gradient'"),
        ({"max_examples": 0}, "max_examples is 0"),
        ({"max_examples": float("inf")}, "max_examples is inf"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Server(1, rule=NeverSplit(), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sketch": "1024"}, "sketch is '1024'; give the size"),
        ({"sketch": 64.0}, "sketch is 64.0; give the size"),
        ({"sketch": 64, "keep_updates": "no"}, "keep_updates is 'no'"),
    ],
)
def test_options_of_another_type_are_named(settings, message):
    with pytest.raises(TypeError, match=message):
        Server(DIM, **settings)


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="keep_updates is False without sketches"):
        Server(DIM, keep_updates=False)
    with pytest.raises(ValueError, match="no other aggregate than weighted_mean"):
        Server(DIM, sketch=SIZE, keep_updates=False, aggregate=median)
    with pytest.raises(ValueError, match="sketch is 3"):
        Server(DIM, sketch=3)
    with pytest.raises(ValueError, match="sketch is for vectors of 299 numbers"):
        Server(DIM, sketch=Projection(dim=299, size=32))
    server = Server(DIM, rule=NeverSplit())
    old = server.intake()
    server.step({})
    with pytest.raises(ValueError, match="the intake is of round 1, and this is round 2"):
        server.step(old)


def test_sketches_have_no_more_numbers_than_what_is_compared():
    server = Server(100, sketch=2_000_000)

    assert server.projection.size == 100
    assert Server(10, sketch=1024).projection.size == 16


def test_a_guard_of_another_type_is_refused():
    with pytest.raises(TypeError, match="guard is 3; pass a Guard"):
        Server(2, guard=3)
