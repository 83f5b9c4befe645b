"""Settings of privacy that are refused or warned of."""

import json
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

import fedbranch as fb
from fedbranch.privacy import Privacy
from sim.hidden_runs import (
    ROTATION,
    SECRET,
    simulate,
)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"secret": b"x" * 32}, TypeError, "secret is a bytes; pass a Secret"),
        ({"transform": "rotations"}, ValueError, "transform is 'rotations'; it must be one of"),
        ({"sketch": 0}, ValueError, "sketch is 0; it must be at least 16"),
        ({"sketch": 15}, ValueError, "sketch is 15; it must be at least 16"),
        ({"sketch": True}, TypeError, "sketch is True; it must be a whole number"),
        ({"sketch": 64.0}, TypeError, "sketch is 64.0; it must be a whole number"),
        ({"sketch": "64"}, TypeError, "sketch is '64'; it must be a whole number"),
        ({"sketch": 64, "transform": "permutation"}, ValueError, "after a rotation only"),
        ({"sketch": 64, "transform": None}, ValueError, "after a rotation only"),
        ({"noise": 1.0}, TypeError, r"noise is 1.0; pass Noise\(clip"),
    ],
)
def test_impossible_settings_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        Privacy(**{"secret": SECRET, **settings})


def test_a_sketch_longer_than_the_model_is_refused():
    with pytest.raises(
        ValueError, match=r"sketch is 10000, but .* has only 960 numbers; take fewer of them"
    ):
        simulate(Privacy(SECRET, sketch=10_000), rounds=1)


def test_a_sketch_size_may_be_a_numpy_integer(tmp_path):
    simulate(Privacy(SECRET, sketch=np.int64(64)), rounds=1, folder=tmp_path)

    assert json.loads((tmp_path / "run.json").read_text())["privacy"]["sketch"] == 64


@pytest.mark.parametrize("method", [fb.simulate, fb.fedavg, fb.local, fb.oracle, fb.ifca])
@pytest.mark.parametrize("privacy", [SECRET, "rotation", True, False, {}], ids=repr)
def test_a_privacy_of_another_type_is_named(method, privacy):
    settings = {"num_clusters": 2} if method is fb.ifca else {}

    with pytest.raises(TypeError, match=r"privacy is a \w+; pass Privacy\(Secret"):
        simulate(privacy, method=method, rounds=1, **settings)


TINY = {"x": fb.ClientData((np.float32([[1, 2], [3, 4]]), np.array([0, 1])), None)}


def test_a_model_of_a_few_numbers_is_hardly_hidden():
    with pytest.warns(RuntimeWarning, match="a model of 6 numbers is hardly hidden by a rotation"):
        fb.simulate(nn.Linear(2, 2), TINY, rounds=1, privacy=ROTATION)


def test_a_small_model_without_a_transform_gives_no_warning():
    fb.simulate(nn.Linear(2, 2), TINY, rounds=1, privacy=replace(ROTATION, transform=None))


def test_a_sketch_of_a_model_of_a_few_numbers_is_refused():
    with (
        pytest.warns(RuntimeWarning, match="hardly hidden"),
        pytest.raises(ValueError, match=r"sketch is 16, .* only 6 numbers; take sketch=None"),
    ):
        fb.simulate(nn.Linear(2, 2), TINY, rounds=1, privacy=Privacy(SECRET, sketch=16))
