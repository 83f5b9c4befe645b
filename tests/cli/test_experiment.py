import re

import pytest

from fedbranch import AutoRule, InvalidExperiment, Thresholds
from fedbranch.cli.data_settings import DIGITS_ROWS, DIGITS_WIDTH, IMAGE_SETS, NUM_CLASSES
from fedbranch.cli.experiment import Experiment, preset_names
from fedbranch.data import digits, sources
from fedbranch.errors import MissingData

SMALL = """
rounds = 3
baselines = []
[data]
num_clients = 4
[training]
learning_rate = 0.1
epochs = 1
[rule]
eps_mean = 0.1
eps_max = 0.4
gamma_max = 0.5
"""


def test_a_small_file_is_enough():
    experiment = Experiment.parse(SMALL, "small.toml")

    assert experiment.data.num_clients == 4
    assert experiment.seed == 0
    assert experiment.rule.min_cluster_size == 1
    assert experiment.methods == ["cfl"]


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid_and_survive_json(name):
    experiment = Experiment.preset(name)

    assert Experiment.from_json(experiment.to_json()) == experiment


BAD = [
    ("rounds = 3", "rounds = 0", "rounds is 0; it must be at least 1"),
    ("rounds = 3", "rounds = 'many'", "rounds is 'many'; it must be a whole number"),
    ("rounds = 3", "rounds = 3.5", "rounds is 3.5; it must be a whole number"),
    ("rounds = 3", "rounds = true", "rounds is True; it must be a whole number"),
    ("rounds = 3", "", "rounds is missing"),
    ("rounds = 3", "rouns = 3", "rouns = 3 is not a setting; did you mean rounds?"),
    ("rounds = 3", "rounds = 3\nfoo = 1", "foo = 1 is not a setting; known: rounds"),
    ("epochs = 1", "epochs = 0", "training.epochs is 0; it must be at least 1"),
    ("epochs = 1", "", "training.epochs is None and steps None; give exactly one"),
    ("epochs = 1", "epoch = 1", "did you mean training.epochs?"),
    ("learning_rate = 0.1", "learning_rate = -1", "training.learning_rate is -1.0"),
    ("learning_rate = 0.1", "learning_rate = '0.1'", "it must be a finite number"),
    ("learning_rate = 0.1", "learning_rate = inf", "learning_rate is inf; it must be a finite"),
    ("learning_rate = 0.1", f"learning_rate = {'9' * 401}", "far too large"),
    ("learning_rate = 0.1", f"learning_rate = {'9' * 5001}", "small.toml"),
    ("rounds = 3", f"rounds = 3\nseed = {10**23}", "seed is 100000"),
    ("rounds = 3", f"rounds = 3\nx = {'[' * 3000}{']' * 3000}", "small.toml"),
    ("rounds = 3", 'rounds = 3\n"a\\nb" = 1', r"'a\nb' = 1 is not a setting"),
    ("num_clients = 4", "num_clients = 2000", "data.num_clients is 2000; it must be between 1"),
    ("num_clients = 4", "num_clients = 4\ntest_fraction = 0.9999", "data.num_clients is 4"),
    ("num_clients = 4", "num_clients = 50\nstructure='label-swap'\nnum_groups=46", "1 and 45"),
    ("num_clients = 4", "num_clients = 4\npartition='shards'\nshards_per_client=999", "shards_per"),
    ("num_clients = 4", "num_clients = 4\nalpha = 1e30", "data.alpha is 1e+30"),
    ("num_clients = 4", "num_clients = 4\nratio = 0.5", "data.ratio is 0.5"),
    ("epochs = 1", "epochs = 1\nweight_decay = 1e14", "training.weight_decay is"),
    ("[data]", "[model]\nhidden = [1000000]\n[data]", "model.hidden is [1000000]"),
    ("[data]", "[model]\nname='cnn'\nchannels = [1, 1, 1, 1]\n[data]", "model.channels is"),
    ("num_clients = 4", "num_clients = 4\nsource = 'mnits'", "data.source is 'mnits'; it must be"),
    (
        "num_clients = 4",
        "num_clients = 30001\nsource = 'mnist'",
        "between 1 and 30000, for the 60000",
    ),
    ("epochs = 1", "epochs = 1\noptimizer = 'lion'", "it must be one of 'sgd', 'adam'"),
    ("epochs = 1", "epochs = 1\noptimizer = 'adam'\nmomentum = 0.9", "training.momentum is 0.9"),
    ("num_clients = 4", "num_clients = 4\nstructure = 'swap'", "data.structure is 'swap'"),
    ("num_clients = 4", "num_clients = 4\nnum_groups = 5", "data.num_groups is 5"),
    ("num_clients = 4", "num_clients = 4\nnum_groups = 2", "structure is 'none' with num_groups"),
    ("gamma_max = 0.5", "gamma_max = 1.5", "rule.gamma_max is 1.5; it must be a number in [0, 1)"),
    ("gamma_max = 0.5", "", "rule.gamma_max is missing"),
    ("baselines = []", "baselines = ['fedsgd']", "baselines is 'fedsgd'; it must be one of"),
    ("baselines = []", "baselines = 'fedavg'", "baselines is 'fedavg'; it must be a list"),
    ("baselines = []", "baselines = ['local', 'local']", "without repetitions"),
    ("[data]\nnum_clients = 4", "data = 3", "data is 3; it must be a table"),
    ("[data]", "[model]\nname = 'cnn'\nhidden = []\n[data]", "model.hidden is []"),
    ("[data]", "[model]\nhidden = [0]\n[data]", "model.hidden is [0]"),
    ("rounds = 3", "rounds = ", "Invalid value"),
]


@pytest.mark.parametrize(("line", "replacement", "message"), BAD)
def test_a_bad_setting_is_named_in_one_line(line, replacement, message):
    with pytest.raises(InvalidExperiment) as caught:
        Experiment.parse(SMALL.replace(line, replacement), "small.toml")

    text = str(caught.value)
    assert text.startswith("small.toml: ")
    assert message in text
    assert "\n" not in text


def test_a_missing_file_and_an_unknown_preset_are_named(tmp_path):
    with pytest.raises(
        InvalidExperiment, match=r"nothing\.toml cannot be read: No such file or directory$"
    ):
        Experiment.load(tmp_path / "nothing.toml")
    with pytest.raises(InvalidExperiment, match="did you mean 'demo'"):
        Experiment.preset("dmo")
    with pytest.raises(InvalidExperiment, match="seed is -1"):
        Experiment.preset("demo").with_seed(-1)


def test_the_known_sizes_of_the_data_are_their_real_ones():
    x, y = digits()

    assert x.shape == (DIGITS_ROWS, 1, DIGITS_WIDTH, DIGITS_WIDTH)
    assert len(set(y)) == NUM_CLASSES
    assert all(images.num_classes == NUM_CLASSES for images in IMAGE_SETS.values())


def test_a_draw_that_does_not_work_out_is_named(tmp_path):
    text = SMALL.replace(
        "num_clients = 4", "num_clients = 700\npartition = 'dirichlet'\nalpha = 0.001"
    )

    with pytest.raises(InvalidExperiment, match="data: 1000 draws with alpha"):
        Experiment.parse(text, "").run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "data",
    [
        "structure = 'label-swap'\nnum_groups = 2",
        "structure = 'label-permutation'\nnum_groups = 2",
        "structure = 'rotation'\nnum_groups = 2",
        "structure = 'feature-noise'\nnum_groups = 2",
        "partition = 'dirichlet'\nheld_out = 'own'",
        "partition = 'shards'",
        "partition = 'quantity-skew'",
    ],
)
def test_every_structure_and_partition_makes_clients(data):
    experiment = Experiment.parse(SMALL.replace("num_clients = 4", f"num_clients = 4\n{data}"), "")

    first, again = experiment.data.clients(0), experiment.data.clients(0)

    assert len(first) == 4
    assert all((first[i].train.x == again[i].train.x).all() for i in first)


def test_larger_images_can_be_halved_more_often():
    layers = "[model]\nname='cnn'\nchannels = [1, 1, 1, 1]\n[data]\nsource = 'mnist'"

    assert len(Experiment.parse(SMALL.replace("[data]", layers), "").model.channels) == 4


def test_a_set_that_is_not_there_is_named_before_anything_is_run(tmp_path):
    text = SMALL.replace("[data]", "[data]\nsource = 'mnist'")

    with pytest.raises(MissingData, match=f"fedbranch data mnist --data-dir {tmp_path}"):
        Experiment.parse(text, "").run(tmp_path / "run", data_dir=tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not sources.is_present("mnist"), reason="no MNIST")
@pytest.mark.parametrize(
    ("held_out", "num_train", "num_test"), [("shared", 300, 10_000), ("own", 240, 60)]
)
def test_mnist_is_tested_on_its_own_test_rows_or_on_the_clients(held_out, num_train, num_test):
    text = SMALL.replace(
        "num_clients = 4", f"num_clients = 200\nsource = 'mnist'\nheld_out = '{held_out}'"
    )

    clients = Experiment.parse(text, "").data.clients(0)

    assert {len(client.train.y) for client in clients.values()} == {num_train}
    assert {len(client.test.y) for client in clients.values()} == {num_test}


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ("name = 'logistic-regression'", ""),
        ("name = 'cnn'\nchannels = [4]\nhidden = [8]", "optimizer = 'adam'"),
        ("name = 'mlp'\nhidden = [16, 16]", "compare = 'gradient'\nmomentum = 0.5"),
    ],
)
def test_every_model_and_optimiser_runs(tmp_path, model, training):
    text = SMALL.replace("[training]", f"[model]\n{model}\n[training]\n{training}")
    text = text.replace("baselines = []", "baselines = ['fedavg', 'local', 'oracle', 'ifca']")
    rounds = []

    run = Experiment.parse(text, "").run(
        tmp_path / "run", on_round=lambda method, entry: rounds.append(method)
    )

    assert len(run.history()) == 3
    assert set(run.baselines) == {"fedavg", "local", "oracle", "ifca"}
    assert rounds == [m for m in ("cfl", "fedavg", "local", "oracle", "ifca") for _ in range(3)]


RULES = [
    ("", AutoRule()),
    ("[rule]", AutoRule()),
    (
        "[rule]\nonly_conflicts = true\nreview_after = [3]",
        AutoRule(only_conflicts=True, review_after=(3,)),
    ),
    ("[rule]\ncoverage = 1.0", AutoRule(coverage=1.0)),
    (
        "[rule]\neps_mean = 0.1\neps_max = 0.2\ngamma_max = 0.3",
        Thresholds(eps_mean=0.1, eps_max=0.2, gamma_max=0.3),
    ),
]


@pytest.mark.parametrize(("table", "rule"), RULES)
def test_the_rule_is_known_by_its_settings(table, rule):
    text = SMALL[: SMALL.index("[rule]")] + table

    experiment = Experiment.parse(text, "small.toml")

    assert experiment.rule == rule
    assert Experiment.from_json(experiment.to_json()) == experiment


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("only_conflicts = 'yes'", "rule.only_conflicts is 'yes'; it must be true or false"),
        ("review_after = [5, 2]", "rule.review_after is (5, 2); it must be positive and ascending"),
        ("only_conflict = true", "did you mean rule.only_conflicts?"),
        ("eps_maen = 0.1", "did you mean rule.eps_mean?"),
        ("min_rounds = 3", "rule.eps_mean is missing"),
        ("only_conflicts = true\neps_mean = 0.1", "rule.eps_mean belongs to Thresholds"),
    ],
)
def test_mistakes_in_a_rule_are_named(table, message):
    text = SMALL[: SMALL.index("[rule]")] + f"[rule]\n{table}"

    with pytest.raises(InvalidExperiment, match=re.escape(message)):
        Experiment.parse(text, "small.toml")
