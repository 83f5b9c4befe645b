"""The options of a server in an experiment's file: guard, cache, sketches, aggregate."""

import json
import re

import numpy as np
import pytest

import fedbranch as fb
from fedbranch import InvalidExperiment
from fedbranch.cli.experiment import NOT_IN_OLDER_EXPERIMENTS, Experiment
from fedbranch.core import robust
from fedbranch.core.robust import aggregate_to_state
from fedbranch.server.options import ServerOptions

SMALL = """
rounds = 6
{top}
[data]
num_clients = 6
num_groups = 2
structure = "label-permutation"
[training]
learning_rate = 0.5
epochs = 2
batch_size = 120
[rule]
eps_mean = 5.0
eps_max = 0.1
gamma_max = 0.5
{tables}
"""


def parsed(top="", tables="", baselines="[]"):
    text = SMALL.format(top=f"baselines = {baselines}\n{top}", tables=tables)
    return Experiment.parse(text, "small.toml")


def test_without_settings_the_options_are_the_servers_defaults():
    experiment = parsed()

    assert experiment.options() == ServerOptions(rule=experiment.rule)


@pytest.mark.parametrize(
    ("top", "tables", "expected"),
    [
        ('guard = "none"', "", {"guard": None}),
        ("", "[guard]\nmax_share = 0.25", {"guard": fb.Guard(max_share=0.25)}),
        (
            "",
            '[guard]\nmax_length = "none"\nmax_clusters = 3',
            {"guard": fb.Guard(max_length=None, max_clusters=3)},
        ),
        ("", '[cache]\nkind = "in-memory"', {"cache": fb.InMemory()}),
        ("", '[cache]\nkind = "sketched"', {"cache": fb.Sketched()}),
        (
            "",
            '[cache]\nkind = "sketched"\nsize = 64\nseed = 3',
            {"cache": fb.Sketched(size=64, seed=3)},
        ),
        ("sketch = 64\nkeep_updates = false", "", {"sketch": 64, "keep_updates": False}),
        ("max_examples = 1000", "", {"max_examples": 1000.0}),
        ('weighting = "equal"', "", {"weighting": "equal"}),
    ],
)
def test_a_setting_is_an_option_of_the_server(top, tables, expected):
    experiment = parsed(top, tables)

    assert experiment.options() == ServerOptions(rule=experiment.rule, **expected)
    as_json = json.loads(json.dumps(experiment.to_json()))
    assert Experiment.from_json(as_json) == experiment


# In TOML, and as checkpoints and run folders name it.
AGGREGATES = [
    ('"weighted_mean"', {"name": "weighted_mean", "settings": {}}),
    ('"median"', {"name": "median", "settings": {}}),
    (
        '{ name = "trimmed_mean", share = 0.1 }',
        {"name": "trimmed_mean", "settings": {"share": 0.1}},
    ),
    (
        '{ name = "multi_krum", num_attackers = 1 }',
        {"name": "multi_krum", "settings": {"num_attackers": 1, "num_kept": None}},
    ),
    (
        '{ name = "multi_krum", num_attackers = 1, num_kept = 2 }',
        {"name": "multi_krum", "settings": {"num_attackers": 1, "num_kept": 2}},
    ),
]


@pytest.mark.parametrize(("setting", "state"), AGGREGATES)
def test_an_aggregate_is_named(setting, state):
    experiment = parsed(f"aggregate = {setting}")

    assert aggregate_to_state(experiment.options().aggregate) == state
    assert Experiment.from_json(json.loads(json.dumps(experiment.to_json()))) == experiment


def test_every_aggregate_of_ours_can_be_named():
    ours = {**robust._WITHOUT_SETTINGS, **robust._WITH_SETTINGS}

    assert {state["name"] for _, state in AGGREGATES} == set(ours)


def test_a_cache_on_disk_has_its_folder_where_the_command_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = parsed(tables='[cache]\nkind = "on-disk"\nfolder = "edges"')
    absolute = parsed(tables=f'[cache]\nkind = "on-disk"\nfolder = "{tmp_path}/shared"')

    assert relative.options().cache == fb.OnDisk(folder=tmp_path / "edges")
    assert absolute.options().cache == fb.OnDisk(folder=tmp_path / "shared")


@pytest.mark.parametrize(
    ("top", "tables", "of_cfl", "of_baseline"),
    [
        ("", "", fb.Guard(), None),
        ('guard = "none"', "", None, None),
        ("", "[guard]\nnum_best = 2", fb.Guard(num_best=2), fb.Guard(num_best=2)),
    ],
)
def test_a_baseline_has_a_guard_only_if_one_is_named(top, tables, of_cfl, of_baseline):
    experiment = parsed(top, tables)

    assert experiment.options().guard == of_cfl
    assert experiment.options(is_baseline=True).guard == of_baseline


def test_an_older_experiment_is_saved_as_it_was():
    saved = Experiment.preset("demo").to_json()

    assert set(saved) == {
        "baselines", "checkpoint_every", "data", "engine", "evaluate_every", "model",
        "participation", "rounds", "rule", "seed", "training", "weighting",
    }  # fmt: skip
    assert not set(saved) & set(NOT_IN_OLDER_EXPERIMENTS)


MISTAKES = [
    ('guard = "non"', "", "guard is 'non'; it must be one of 'none', or a table"),
    ("", "[guard]\nmax_shar = 0.5", "did you mean guard.max_share?"),
    ("", "[guard]\nmax_share = 2", "guard.max_share is 2.0; it must be in (0, 1]"),
    ("", '[guard]\nmax_length = "no"', 'must be a finite number, or "none"'),
    ("", '[guard]\nnum_best = "none"', "guard.num_best is 'none'; it must be a whole number"),
    ("", '[cache]\nkind = "disk"', "cache.kind is 'disk'; it must be one of 'in-memory', 'sk"),
    ("", "[cache]\nsize = 64", "cache.kind is missing; it is one of 'in-memory', 'sketched', 'o"),
    ('cache = "sketched"', "", "cache is 'sketched'; it must be a table with kind = 'in-memory'"),
    ("", '[cache]\nkind = "sketched"\nsise = 64', "did you mean cache.size?"),
    ("", '[cache]\nkind = "sketched"\nsize = 3', "cache.size is 3; it must be at least 16"),
    ("", '[cache]\nkind = "on-disk"\nfolder = 3', "cache.folder is 3; it must be a text"),
    ("sketch = 3", "", "sketch is 3; sketches have at least 16 numbers"),
    ("sketh = 64", "", "did you mean sketch?"),
    ("keep_updates = false", "", "keep_updates is False without sketches"),
    ("max_examples = 0", "", "max_examples is 0.0; it must be positive"),
    (
        'aggregate = "mean"',
        "",
        "aggregate is 'mean'; it must be one of 'weighted_mean', 'median', or a table with "
        "name = 'trimmed_mean' or 'multi_krum'",
    ),
    ('aggregate = { name = "krum" }', "", "aggregate.name is 'krum'; it must be one of 'trimmed_"),
    ("aggregate = { share = 0.1 }", "", "aggregate.name is missing; it is one of 'trimmed_mean'"),
    ('aggregate = { name = "trimmed_mean" }', "", "aggregate.share is missing; it has no default"),
    ('aggregate = { name = "trimmed_mean", share = 0.5 }', "", "aggregate.share is 0.5; it must"),
    (
        'sketch = 64\nkeep_updates = false\naggregate = "median"',
        "",
        "aggregate is 'median' with keep_updates = false",
    ),
]


@pytest.mark.parametrize(("top", "tables", "message"), MISTAKES)
def test_a_mistake_is_named_in_one_line(top, tables, message):
    with pytest.raises(InvalidExperiment, match=re.escape(message)) as caught:
        parsed(top, tables)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("top", "tables"),
    [
        ('aggregate = "median"', "[guard]\nmax_share = 0.25"),
        ("sketch = 64\nkeep_updates = false", '[cache]\nkind = "sketched"\nsize = 64'),
        ('guard = "none"', '[cache]\nkind = "on-disk"\nfolder = "edges"'),
    ],
)
def test_a_run_has_the_options_and_can_be_resumed_with_them(tmp_path, monkeypatch, top, tables):
    monkeypatch.chdir(tmp_path)
    experiment = parsed(top, tables, baselines='["fedavg", "oracle"]')

    run = experiment.run(tmp_path / "run")
    before = (run.path / "history.jsonl").read_bytes()
    saved = Experiment.from_json(run.about["about"]["experiment"])
    saved.run(tmp_path / "run", resume=True)

    assert saved == experiment
    assert (run.path / "history.jsonl").read_bytes() == before
    described = json.loads(json.dumps(experiment.options().describe()))
    assert run.about["sketch"] == (described.pop("sketch") and {"dim": 2410, "seed": 0, "size": 64})
    assert {name: run.about[name] for name in described} == described
    assert len(run.tree()) > 1
    baseline = run.baselines["fedavg"].about
    assert baseline["rule"]["name"] == "NeverSplit"
    assert baseline["cache"] == run.about["cache"]
    assert (baseline["guard"] is None) == ("[guard]" not in tables)
    kept = run.tree()[1].cached_updates
    assert all(np.isfinite(kept[client_id]).all() for client_id in kept)
