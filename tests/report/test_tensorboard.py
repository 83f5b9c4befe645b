"""Event files, read back by TensorBoard itself."""

import sys

import pytest

from fedbranch.errors import FedbranchError
from fedbranch.report.facts.facts import read_facts
from fedbranch.report.tensorboard import write_events

from .folders import split_run

# TensorBoard's own modules use what NumPy and protobuf have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, round(event.value, 4)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_every_cluster_has_its_lines(tmp_path):
    facts = read_facts([split_run(tmp_path / "small")])

    (path,) = write_events(facts, tmp_path / "events")

    assert path == tmp_path / "events/small"
    assert scalars(path) == {
        "accuracy": [(1, 0.5), (2, 0.6), (4, 0.75)],
        "loss": [(1, 0.5), (2, 0.4), (4, 0.25)],
        "clusters": [(1, 1), (2, 2), (4, 2)],
    }
    assert scalars(path / "cluster-0")["separation/gap"] == [(2, 2.0)]
    assert scalars(path / "cluster-2") == {
        "accuracy": [(2, 0.4), (4, 0.7)],
        "loss": [(2, 0.6), (4, 0.3)],
        "norm/mean update": [(3, 0.3), (4, 0.4)],
        "norm/longest update": [(3, 1.0), (4, 1.0)],
    }


def test_splits_are_told_with_their_reasons(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = write_events(read_facts([split_run(tmp_path / "small")]), tmp_path / "events")

    (event,) = EventAccumulator(str(path)).Reload().Tensors("splits/text_summary")
    assert event.step == 2
    assert event.tensor_proto.string_val == [b"node 0 splits: because of 2"]


def test_event_files_are_not_written_beside_others(tmp_path):
    facts = read_facts([split_run(tmp_path / "small")])
    write_events(facts, tmp_path / "events")

    with pytest.raises(FedbranchError, match="already there"):
        write_events(facts, tmp_path / "events")


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    with pytest.raises(FedbranchError, match=r"pip install 'fedbranch\[tensorboard\]'"):
        write_events({"runs": []}, tmp_path)


def test_a_metric_of_half_a_surrogate_pair_is_written(tmp_path):
    facts = read_facts([split_run(tmp_path / "run")])
    overall = facts["runs"][0]["series"]["overall"]
    overall["\ud800"] = overall.pop("accuracy")

    assert write_events(facts, tmp_path / "events")
