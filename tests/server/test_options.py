"""The options of a server: defaults, errors, keywords, and files."""

import json
import re

import numpy as np
import pytest

from fedbranch import (
    AutoRule,
    DamagedFile,
    Guard,
    InMemory,
    NeverSplit,
    OnDisk,
    Server,
    Sketched,
    Thresholds,
    Update,
)
from fedbranch.core.geometry import weighted_mean
from fedbranch.core.projection import Projection
from fedbranch.core.robust import median, multi_krum, trimmed_mean
from fedbranch.server.options import OptionKeywords, ServerOptions, options_from


def last_one(updates, weights):
    """Return the last update, whatever it counts for."""
    return updates[-1] + 0 * weights[-1]


class Mine:
    """A rule that fedbranch does not have."""

    def examine(self, evidence):
        return NeverSplit().examine(evidence)


def test_the_defaults():
    options = ServerOptions()

    assert options.rule == AutoRule()
    assert (options.weighting, options.aggregate) == ("examples", weighted_mean)
    assert options.guard == Guard()
    assert options.cache == InMemory()
    assert (options.sketch, options.keep_updates) == (None, True)
    assert options.most_clusters == 100
    assert ServerOptions(guard=None).most_clusters == np.inf


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"rule": "auto"}, TypeError, ["rule is 'auto'", "Thresholds(eps_mean="]),
        ({"rule": AutoRule}, TypeError, ["AutoRule", "pass an object"]),
        ({"weighting": "size"}, ValueError, ["weighting is 'size'", "('examples', 'equal')"]),
        ({"aggregate": "median"}, TypeError, ["aggregate is 'median'", "fedbranch.core.median"]),
        ({"max_examples": 0}, ValueError, ["max_examples is 0", "positive and finite"]),
        ({"max_examples": float("inf")}, ValueError, ["max_examples is inf", "finite"]),
        ({"guard": 3}, TypeError, ["guard is 3", "pass a Guard, or None"]),
        ({"sketch": "1024"}, TypeError, ["sketch is '1024'", "such as 1024"]),
        ({"sketch": 64.0}, TypeError, ["sketch is 64.0", "such as 1024"]),
        ({"sketch": 3}, ValueError, ["sketch is 3", "at least 16 numbers"]),
        ({"sketch": 64, "keep_updates": "no"}, TypeError, ["keep_updates is 'no'", "True or"]),
        ({"keep_updates": False}, ValueError, ["without sketches", "sketch=1024"]),
        (
            {"sketch": 64, "keep_updates": False, "aggregate": median},
            ValueError,
            ["aggregate is <function median", "no other aggregate than weighted_mean"],
        ),
    ],
)
def test_an_impossible_option_is_named_with_its_value_and_a_remedy(settings, error, named):
    for make in (lambda: ServerOptions(**settings), lambda: Server(300, **settings)):
        with pytest.raises(error) as caught:
            make()

        assert all(part in str(caught.value) for part in named)


def test_an_impossible_kind_of_comparison_is_named():
    with pytest.raises(ValueError, match="compare is 'gradient'"):
        Server(1, compare="gradient")


def test_a_projection_for_vectors_of_another_length_is_named():
    options = ServerOptions(sketch=Projection(dim=299, size=32))

    for make in (lambda: options.projection_for(300), lambda: Server(300, options=options)):
        with pytest.raises(ValueError, match=r"vectors of 299 numbers; .* 300"):
            make()


def test_sketches_have_no_more_numbers_than_what_is_compared():
    server = Server(100, sketch=2_000_000)

    assert server.projection.size == 100
    assert Server(10, sketch=1024).projection.size == 16


# Options and keywords


def test_keywords_take_the_place_of_what_the_options_say():
    options = ServerOptions(rule=NeverSplit(), sketch=64, weighting="equal")

    server = Server(300, options=options, weighting="examples", max_examples=7)

    assert server.options.rule == NeverSplit()
    assert server.options.weighting == "examples"
    assert server.options.max_examples == 7
    assert server.options.sketch == Projection(dim=300, size=64)
    assert options.sketch == 64  # it is not changed


def test_none_stands_for_the_default_of_rule_and_cache_only():
    options = ServerOptions(rule=NeverSplit(), cache=Sketched(size=32), sketch=64)

    changed = options_from(options, {"rule": None, "cache": None, "guard": None, "sketch": None})

    assert (changed.rule, changed.cache) == (NeverSplit(), Sketched(size=32))
    assert (changed.guard, changed.sketch) == (None, None)


def test_an_unknown_keyword_and_wrong_options_are_named():
    with pytest.raises(TypeError, match=r"\['sketches'\] are no options of a server; .*'sketch'"):
        Server(2, sketches=64)
    with pytest.raises(TypeError, match="options is 3; pass ServerOptions"):
        Server(2, options=3)


def test_every_option_can_be_a_keyword():
    assert OptionKeywords.__annotations__.keys() == ServerOptions.__dataclass_fields__.keys()


# Files

SAVED = {
    "defaults": {},
    "paper": {
        "rule": Thresholds(eps_mean=0.5, eps_max=1, gamma_max=0.5),
        "weighting": "equal",
        "max_examples": 50,
        "guard": None,
    },
    "guarded": {"guard": Guard(max_share=0.2, max_clusters=3), "rule": AutoRule(coverage=0.5)},
    "summed": {"sketch": Projection(dim=300, size=32, seed=5), "keep_updates": False},
    "trimmed mean": {"aggregate": trimmed_mean(0.2)},
    "multi-Krum": {"aggregate": multi_krum(num_attackers=1)},
    "median": {"aggregate": median, "rule": NeverSplit()},
}


@pytest.mark.parametrize("name", SAVED)
def test_options_survive_a_checkpoint(name):
    options = ServerOptions(**SAVED[name])

    state = json.loads(json.dumps(options.to_state()))

    assert ServerOptions.from_state(state, cache=options.cache) == options


@pytest.mark.parametrize("name", SAVED)
def test_a_loaded_server_has_the_options_of_the_saved_one(name, tmp_path):
    server = Server(300, options=ServerOptions(**SAVED[name]))
    server.save(tmp_path)

    assert Server.load(tmp_path).options == server.options


def test_an_older_state_without_an_aggregate_means_the_weighted_mean():
    state = ServerOptions().to_state()
    del state["aggregate"]

    assert ServerOptions.from_state(state, cache=InMemory()).aggregate is weighted_mean


@pytest.mark.parametrize(
    ("settings", "given"), [({"rule": Mine()}, "rule"), ({"aggregate": last_one}, "aggregate")]
)
def test_what_is_the_users_own_must_be_passed_when_loading(settings, given, tmp_path):
    server = Server(2, options=ServerOptions(**settings))
    server.save(tmp_path)

    with pytest.raises(DamagedFile, match=re.escape(f"Server.load(folder, {given}=...)")):
        Server.load(tmp_path)
    again = Server.load(tmp_path, **settings)

    assert getattr(again.options, given) is settings[given]
    again.plan(["a", "b"])
    again.step({i: Update(np.float32([1, n]), 1) for n, i in enumerate("ab")})
    assert again.tree.root.version == 1


@pytest.mark.parametrize("name", SAVED)
def test_a_description_is_json_with_every_option(name):
    options = ServerOptions(**SAVED[name])

    described = json.loads(json.dumps(options.describe()))

    assert described.keys() == ServerOptions.__dataclass_fields__.keys()
    assert described["rule"]["name"] == type(options.rule).__name__
    assert described["weighting"] == options.weighting


def test_a_description_names_what_is_the_users_own(tmp_path):
    described = ServerOptions(
        rule=Mine(), aggregate=last_one, cache=OnDisk(folder=tmp_path)
    ).describe()

    assert described["rule"] == {"name": "Mine", "settings": None}
    assert described["aggregate"] == {"name": "last_one", "settings": None}
    assert described["cache"] == {"kind": "files"}  # where the files are belongs to the machine
