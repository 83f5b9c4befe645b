"""Figures for papers."""

import sys
from xml.etree import ElementTree

import pytest

from fedbranch.errors import CannotWrite, FedbranchError
from fedbranch.report.facts.facts import read_facts
from fedbranch.report.figures import draw, save_figure
from fedbranch.runs import Round, RunFolder
from fedbranch.server.records import RoundRecord
from report.folders import about, played, split_run


@pytest.fixture
def facts(tmp_path):
    return read_facts([split_run(tmp_path / "small")])


@pytest.mark.parametrize("form", ["pdf", "png", "svg"])
def test_the_same_facts_give_the_same_bytes(facts, tmp_path, form):
    save_figure(facts, tmp_path / f"one.{form}")
    save_figure(facts, tmp_path / f"two.{form}")

    content = (tmp_path / f"one.{form}").read_bytes()
    assert content == (tmp_path / f"two.{form}").read_bytes()
    assert content.startswith({"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}[form])


@pytest.mark.parametrize(
    ("what", "titles"),
    [
        ("training", ["Accuracy of each cluster; band: 80% of its clients"]),
        ("tree", ["Clusters"]),
        ("similarity", ["Node 0, round 2"]),
    ],
)
def test_a_part_is_drawn_alone(facts, what, titles):
    figure = draw(facts, what)

    assert [t for axes in figure.axes if (t := axes.get_title(loc="left"))] == titles


def test_training_shows_the_numbers_of_the_facts(facts):
    (axes,) = draw(facts, "training").axes

    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["cluster 2 (2 clients)"].get_xdata().tolist() == [2, 4]
    assert lines["cluster 2 (2 clients)"].get_ydata().tolist() == [0.4, 0.7]


def test_the_gap_is_aligned_in_time_with_training(facts):
    training, norms, gap = draw(facts, "gap").axes

    assert training.get_xlim() == norms.get_xlim() == gap.get_xlim()
    assert any(
        line.get_ydata().tolist() == [2.0] for line in gap.get_lines() if len(line.get_xdata())
    )


def test_several_runs_are_laid_over_each_other(tmp_path):
    folders = [split_run(tmp_path / f"run-{seed}", seed=seed) for seed in range(2)]

    axes = draw(read_facts(folders), "training").axes[0]

    assert [line.get_label() for line in axes.get_lines()] == ["CFL (2 runs)"]
    assert axes.get_title(loc="left") == "Accuracy, mean over clients; band: all seeds"


def test_a_run_without_splits_can_be_drawn(tmp_path):
    folder = RunFolder.create(tmp_path / "plain", about("ab"))
    folder.append(played(1, {0: 2}, {"a": 0.5, "b": 0.7}, joined=("a", "b")))

    figure = draw(read_facts([folder]))

    assert len(figure.axes) == 2


@pytest.mark.parametrize("what", ["training", "gap", "similarity"])
def test_what_is_not_there_cannot_be_drawn(tmp_path, what):
    facts = read_facts([RunFolder.create(tmp_path / "new", about("ab"))])

    with pytest.raises(FedbranchError, match=f"nothing to draw of '{what}'"):
        draw(facts, what)


def test_other_formats_are_refused(facts, tmp_path):
    with pytest.raises(ValueError, match=r"fig\.doc .* \.pdf, \.png, \.svg"):
        save_figure(facts, tmp_path / "fig.doc")


def test_a_folder_that_is_not_there_is_our_own_error(facts, tmp_path):
    with pytest.raises(CannotWrite, match="missing"):
        save_figure(facts, tmp_path / "missing" / "fig.png")


def test_without_matplotlib_the_error_says_what_to_install(facts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(FedbranchError, match=r"pip install 'fedbranch\[report\]'"):
        save_figure(facts, tmp_path / "fig.png")


def metric_run(path, name, value=0.5):
    folder = RunFolder.create(path, about("a"))
    record = RoundRecord(round=1, cluster_sizes={0: 1}, joined=("a",))
    folder.append(Round(record=record, evaluation={"a": {name: value}}))
    return folder


@pytest.mark.parametrize("name", [r"$\frac{$", "a\x00\x1b", "a\ud800", "x" * 1000, ""])
def test_any_name_of_a_metric_can_be_drawn(tmp_path, name):
    runs = [metric_run(tmp_path / run, name) for run in (r"$\x{$", r"$\y{$")]

    save_figure(read_facts(runs), tmp_path / "fig.svg")

    ElementTree.parse(tmp_path / "fig.svg")


def test_abbreviations_stay_as_they_are(tmp_path):
    (axes,) = draw(read_facts([metric_run(tmp_path / "run", "mean AUC")]), "training").axes

    assert axes.get_title(loc="left").startswith("Mean AUC of each cluster")


def test_a_run_whose_metrics_are_all_nan_can_be_drawn(tmp_path):
    save_figure(read_facts([metric_run(tmp_path / "run", "loss", None)]), tmp_path / "fig.svg")
