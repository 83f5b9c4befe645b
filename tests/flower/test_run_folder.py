"""Federations that are stopped and go on, and what may be wrong with their folders."""

import copy
import json
import shutil

import pytest

import fedbranch as fb
from fedbranch.errors import DamagedFile, UnusableRun
from fedbranch.flower.testing import FakeNode
from fedbranch.report.facts.run import read_run
from fedbranch.runs import RunFolder
from flower.federations import (
    Killed,
    contents_of,
    kill_after,
    make_clients,
    make_grid,
    make_model,
    simulate,
    start,
)


@pytest.mark.parametrize("has_buffers", [False, True])
@pytest.mark.parametrize("killed_after", [1, 20, 29])
def test_a_killed_server_app_goes_on_to_the_same_bytes(tmp_path, has_buffers, killed_after):
    clients = make_clients()

    def run(folder, *, seed=0, **more):
        model = make_model(seed, has_buffers=has_buffers)
        grid = make_grid(clients, copy.deepcopy(model))
        return start(grid, model=model, checkpoint_dir=folder, **more)

    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "cut", start_with=kill_after(killed_after))

    # The app draws other initial numbers when it starts again: those of the run count.
    resumed = run(tmp_path / "cut", seed=1, resume=True)

    assert contents_of(tmp_path / "whole") == contents_of(tmp_path / "cut")
    assert resumed.evaluate_metrics_clientapp == whole.evaluate_metrics_clientapp
    assert resumed.train_metrics_clientapp == whole.train_metrics_clientapp
    assert resumed.history == whole.history
    assert resumed.arrays == whole.arrays


def test_a_resumed_run_remembers_which_clients_are_away(tmp_path):
    def run(folder, killed_in=None, **more):
        grid = make_grid(make_clients(num_clients=10))

        def lose_four(number, arrays):
            if number == 1 or more:
                for i in range(6, 10):
                    grid.nodes.pop(FakeNode.simulated(i, 10).node_id, None)
            if number == killed_in:
                raise Killed

        return start(
            grid,
            num_rounds=30,
            timeout=0.02,
            checkpoint_dir=folder,
            start_with={"evaluate_fn": lose_four},
            **more,
        )

    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "cut", killed_in=8)
    run(tmp_path / "cut", resume=True)

    assert len(whole.clusters) == 2
    assert contents_of(tmp_path / "whole") == contents_of(tmp_path / "cut")


def test_fewer_rounds_and_then_more_end_as_one_run_does(tmp_path):
    start(make_grid(), num_rounds=12, checkpoint_dir=tmp_path / "whole")
    with pytest.raises(Killed):
        start(make_grid(), num_rounds=12, checkpoint_dir=tmp_path / "cut", start_with=kill_after(6))
    folder = tmp_path / "cut"
    for rounds, done in [(8, 8), (3, 8), (12, 12)]:
        start(make_grid(), num_rounds=rounds, checkpoint_dir=folder, resume=True)
        assert RunFolder(folder).is_complete
        assert RunFolder(folder).about["rounds"] == RunFolder(folder).summary["rounds"] == done

    assert contents_of(tmp_path / "whole") == contents_of(folder)


def test_a_lost_state_is_damage_and_not_a_new_start(tmp_path):
    start(make_grid(), num_rounds=5, checkpoint_dir=tmp_path)
    shutil.rmtree(tmp_path / "state")

    with pytest.raises(DamagedFile, match="state is missing, but rounds have been done"):
        start(make_grid(), num_rounds=9, checkpoint_dir=tmp_path, resume=True)
    assert len(RunFolder(tmp_path).history()) == 5
    assert RunFolder(tmp_path).about["rounds"] == 5


def test_another_runs_initial_model_is_damage(tmp_path):
    start(make_grid(), num_rounds=2, checkpoint_dir=tmp_path / "a")
    model = make_model(has_buffers=True)
    grid = make_grid(model=copy.deepcopy(model))
    start(grid, model=model, num_rounds=2, checkpoint_dir=tmp_path / "b")
    shutil.rmtree(tmp_path / "a" / "initial")
    shutil.copytree(tmp_path / "b" / "initial", tmp_path / "a" / "initial")

    with pytest.raises(DamagedFile, match="holds another model than the run"):
        start(make_grid(), num_rounds=3, checkpoint_dir=tmp_path / "a", resume=True)


def test_a_simulators_folder_is_not_resumed_as_a_federation(tmp_path):
    simulate(make_clients(), make_model(), rounds=2, folder=tmp_path)

    with pytest.raises(UnusableRun, match="its driver is not the one given now"):
        start(make_grid(), num_rounds=4, checkpoint_dir=tmp_path, resume=True)


def test_two_server_apps_cannot_write_into_one_folder(tmp_path):
    refusals = []

    def start_another(number, arrays):
        if number == 1:
            with pytest.raises(UnusableRun, match="another process is writing") as refusal:
                start(make_grid(), num_rounds=3, checkpoint_dir=tmp_path / "a", resume=True)
            refusals.append(refusal)

    start(make_grid(), num_rounds=3, checkpoint_dir=tmp_path / "b")
    start(
        make_grid(),
        num_rounds=3,
        checkpoint_dir=tmp_path / "a",
        start_with={"evaluate_fn": start_another},
    )

    assert len(refusals) == 1
    assert contents_of(tmp_path / "a") == contents_of(tmp_path / "b")


def test_resume_without_a_run_starts_one(tmp_path):
    result = start(make_grid(), num_rounds=2, checkpoint_dir=tmp_path / "new", resume=True)

    assert len(result.history) == 2


def test_a_folder_that_is_taken_is_not_overwritten(tmp_path):
    start(make_grid(), num_rounds=2, checkpoint_dir=tmp_path / "run")

    with pytest.raises(UnusableRun, match=r"resume it \(resume=True\), or choose another"):
        start(make_grid(), num_rounds=2, checkpoint_dir=tmp_path / "run")


def test_a_complete_run_can_get_more_rounds(tmp_path):
    start(make_grid(), num_rounds=10, checkpoint_dir=tmp_path / "more")
    start(make_grid(), num_rounds=30, checkpoint_dir=tmp_path / "whole")

    start(make_grid(), num_rounds=30, checkpoint_dir=tmp_path / "more", resume=True)

    assert contents_of(tmp_path / "more") == contents_of(tmp_path / "whole")


def test_a_run_with_other_settings_is_not_resumed(tmp_path):
    start(make_grid(), num_rounds=2, checkpoint_dir=tmp_path)

    for other, name in [
        ({"rule": fb.NeverSplit()}, "rule"),
        ({"seed": 5}, "seed"),
        ({"model": make_model(has_buffers=True)}, "model"),
    ]:
        with pytest.raises(UnusableRun, match=f"its {name} is not the one given now"):
            start(make_grid(), num_rounds=4, checkpoint_dir=tmp_path, resume=True, **other)


def test_a_changed_initial_model_is_damage(tmp_path):
    start(make_grid(), num_rounds=2, checkpoint_dir=tmp_path)
    (file,) = (tmp_path / "initial").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")

    with pytest.raises(DamagedFile, match="was cut or changed"):
        start(make_grid(), num_rounds=4, checkpoint_dir=tmp_path, resume=True)


def test_a_federations_folder_is_shown_like_a_simulations(tmp_path):
    result = start(make_grid(), checkpoint_dir=tmp_path)

    run = read_run(RunFolder(tmp_path))

    assert run.is_complete
    assert run.main_metric == "accuracy"
    assert run.clusters == result.clusters
    assert len(run.splits) == 1
    assert json.loads((tmp_path / "run.json").read_text())["driver"] == "flower"
