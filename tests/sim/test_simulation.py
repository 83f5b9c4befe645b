import copy

import numpy as np
import pytest
import torch
from torch import nn

import fedbranch as fb
from fakes import fingerprint
from fedbranch.runs import RunFolder
from fedbranch.training.client import evaluate, local_update
from fedbranch.training.model_state import ModelState
from fedbranch.training.seeds import stream_seed
from sim.two_groups import (
    RULE,
    TRAINING,
    Interrupted,
    folder_bytes,
    interrupt_after,
    make_clients,
    make_model,
    simulate,
)


def test_conflicting_clients_end_in_clusters_of_their_own():
    run = simulate()

    assert sorted(run.clusters.values()) == [["c0", "c2", "c4"], ["c1", "c3", "c5"]]
    assert min(metrics["accuracy"] for metrics in run.evaluation.values()) > 0.8


def test_a_hand_written_loop_gives_the_same_bytes():
    clients, model = make_clients(), make_model()
    initial = ModelState.of(model)
    server = fb.Server(len(initial.params), rule=RULE)
    for number in range(1, 31):
        tasks = server.plan(clients)
        server.step(
            {
                client_id: local_update(
                    copy.deepcopy(model),
                    initial,
                    task,
                    clients[client_id].train,
                    TRAINING,
                    seed=stream_seed(3, number, client_id),
                )
                for client_id, task in tasks.items()
            }
        )

    assert fingerprint(simulate(clients, engine="reference").server) == fingerprint(server)


def test_the_order_of_clients_changes_no_bit():
    clients = make_clients()
    backwards = dict(reversed(clients.items()))

    for participation in (1.0, 0.5):
        first, second = (simulate(c, participation=participation) for c in (clients, backwards))
        assert fingerprint(first.server) == fingerprint(second.server)


def test_the_users_model_is_not_changed():
    model = make_model()
    before = copy.deepcopy(model.state_dict())

    fb.simulate(model, make_clients(), rule=RULE, rounds=2, training=TRAINING)

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_clients_model_is_the_one_that_was_evaluated():
    clients = make_clients()
    run = simulate(clients)

    for client_id, client in clients.items():
        measured = evaluate(run.model(client_id), client.test, TRAINING)
        assert measured == pytest.approx(run.evaluation[client_id], rel=1e-5)


def test_means_over_clusters_and_over_all_count_every_client_alike():
    run = simulate()
    accuracy = {i: metrics["accuracy"] for i, metrics in run.evaluation.items()}

    for leaf, client_ids in run.clusters.items():
        expected = np.mean([accuracy[i] for i in client_ids])
        assert run.cluster_means[leaf]["accuracy"] == pytest.approx(expected)
    assert run.overall_mean["accuracy"] == pytest.approx(np.mean(list(accuracy.values())))


def test_the_models_on_a_clients_path_go_from_general_to_specific():
    clients = make_clients()
    run = simulate(clients)
    path = run.tree.path(run.tree.position("c0"))

    general, specific = (evaluate(run.model_at(n.id), clients["c0"].test, TRAINING) for n in path)

    assert specific["accuracy"] > general["accuracy"] + 0.2


def test_evaluation_is_every_few_rounds_as_asked_and_at_the_end():
    run = simulate(rounds=7, evaluate_every=3)

    assert [bool(entry.evaluation) for entry in run.history] == [0, 0, 1, 0, 0, 1, 1]
    assert set(run.evaluation) == {f"c{i}" for i in range(6)}


def test_a_client_without_test_data_is_not_evaluated():
    clients = make_clients(3)
    clients["c1"] = fb.ClientData((clients["c1"].train.x, clients["c1"].train.y))

    run = simulate(clients, rounds=2)

    assert set(run.evaluation) == {"c0", "c2"}


def test_half_of_the_clients_take_part():
    run = simulate(rounds=60, participation=0.5)

    assert all(len(entry.record.metrics) <= 3 for entry in run.history)
    assert sorted(run.clusters.values()) == [["c0", "c2", "c4"], ["c1", "c3", "c5"]]


def test_a_late_client_is_routed_and_one_that_leaves_is_gone():
    joining = simulate(make_clients(joins=25), rounds=30)
    leaving = simulate(make_clients(leaves=25), rounds=30)

    assert joining.history[23].record.cluster_sizes == {1: 3, 2: 2}
    assert joining.history[24].record.joined == ("c5",)
    assert [move.client_id for move in joining.history[24].record.routed] == ["c5"]
    assert sorted(joining.clusters.values()) == [["c0", "c2", "c4"], ["c1", "c3", "c5"]]
    assert leaving.history[24].record.left == ("c5",)
    assert sorted(leaving.clusters.values()) == [["c0", "c2", "c4"], ["c1", "c3"]]
    assert "c5" not in leaving.evaluation


def test_a_round_without_clients_is_an_empty_round():
    x, y = np.ones((4, 3), dtype=np.float32), np.zeros(4, dtype=np.int64)

    run = simulate({"late": fb.ClientData((x, y), joins=3)}, rounds=4)

    assert [len(entry.record.metrics) for entry in run.history] == [0, 0, 1, 1]


def test_gradients_can_be_compared_instead_of_updates():
    training = fb.LocalTraining(optimizer=fb.sgd(0.3), epochs=2, batch_size=10, send_gradient=True)
    rule = fb.Thresholds(eps_mean=0.05, eps_max=0.1, gamma_max=0.5, min_cluster_size=3)

    run = simulate(training=training, rule=rule)

    assert sorted(run.clusters.values()) == [["c0", "c2", "c4"], ["c1", "c3", "c5"]]
    assert run.server.compare == "signal"


def test_batchnorm_models_train_and_their_statistics_are_averaged():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    rule = fb.Thresholds(eps_mean=0.3, eps_max=0.5, gamma_max=0.5, min_cluster_size=3)

    run = fb.simulate(model, make_clients(), rule=rule, rounds=30, training=TRAINING)

    assert sorted(run.clusters.values()) == [["c0", "c2", "c4"], ["c1", "c3", "c5"]]
    normed = run.model("c0")[1]
    assert normed.running_mean.abs().sum() > 0
    # 40 examples in batches of 10, two epochs a round; in the round of the split no model moves.
    assert normed.num_batches_tracked.item() == 8 * 29


def test_clients_are_present_from_their_round_whether_or_not_they_are_asked():
    run = simulate(make_clients(joins=4), rounds=5, participation=0.2)

    assert [len(entry.evaluation) for entry in run.history] == [5, 5, 5, 6, 6]
    assert run.history[0].record.joined == ("c0", "c1", "c2", "c3", "c4")
    assert run.history[3].record.joined == ("c5",)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([1, 2], "clients is a list; pass a dict"),
        ({"a": (np.zeros((2, 3)), [0, 1])}, "client 'a' is a tuple; pass ClientData"),
    ],
)
def test_clients_of_another_kind_are_named(clients, message):
    with pytest.raises(TypeError, match=message):
        simulate(clients)


def test_a_regression_under_the_default_loss_is_named():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3)).astype(np.float32)
    clients = {"a": fb.ClientData((x, x.sum(axis=1, keepdims=True)))}

    with pytest.raises(fb.ClientFailed, match="For a regression pass LocalTraining"):
        fb.simulate(nn.Linear(3, 1), clients, rule=RULE, rounds=1)


def test_the_repr_of_a_run_is_one_line():
    assert repr(simulate(rounds=2)) == "<Run: 2 rounds, clusters of 3 + 3 clients, path None>"


def test_a_client_whose_data_do_not_fit_is_named():
    clients = make_clients()
    x, y = np.ones((4, 7), dtype=np.float32), np.zeros(4, dtype=np.int64)

    with pytest.raises(fb.ClientFailed, match=r"client 'wide' could not be trained.*\(4, 7\)"):
        simulate({**clients, "wide": fb.ClientData((x, y))})
    with pytest.raises(fb.ClientFailed, match="client 'c0' could not be evaluated"):
        simulate({"c0": fb.ClientData(tuple(clients["c0"].train), (x, y))})


def test_a_diverging_client_is_refused_and_the_others_train():
    clients = make_clients()
    clients["wild"] = fb.ClientData((np.full((40, 3), 1e30, dtype=np.float32), np.zeros(40, int)))

    run = simulate(clients)

    assert all("wild" in entry.record.refused for entry in run.history)
    assert all(np.isfinite(node.params).all() for node in run.tree)


@pytest.mark.parametrize("stop", [1, 3, 4, 9, 14, 15, 16, 30])
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path, stop):
    settings = {"participation": 0.5, "checkpoint_every": 4, "clients": make_clients(joins=12)}
    simulate(folder=tmp_path / "whole", **settings)

    with pytest.raises(Interrupted):
        simulate(folder=tmp_path / "parts", on_round=interrupt_after(stop), **settings)
    run = simulate(folder=tmp_path / "parts", resume=True, **settings)

    assert folder_bytes(tmp_path / "parts") == folder_bytes(tmp_path / "whole")
    assert [entry.record.round for entry in run.history] == list(range(1, 31))


@pytest.mark.parametrize("cache", [fb.Sketched(size=16), fb.OnDisk(folder="edges")])
def test_the_server_keeps_edges_as_it_is_told_also_after_a_resume(tmp_path, monkeypatch, cache):
    monkeypatch.chdir(tmp_path)
    if isinstance(cache, fb.OnDisk):
        cache = fb.OnDisk(folder="edges")  # relative to the current folder
    settings = {"clients": make_clients(joins=26), "cache": cache, "checkpoint_every": 5}
    whole = simulate(folder=tmp_path / "whole", **settings)
    with pytest.raises(Interrupted):
        simulate(folder=tmp_path / "parts", on_round=interrupt_after(27), **settings)

    resumed = simulate(folder=tmp_path / "parts", resume=True, **settings)

    assert resumed.server.tree.cache == cache
    assert fingerprint(resumed.server) == fingerprint(whole.server)
    assert whole.clusters == simulate(make_clients(joins=26)).clusters
    assert [move.client_id for entry in whole.history for move in entry.record.routed] == ["c5"]
    assert RunFolder(tmp_path / "whole").tree().cache != fb.InMemory()
    with pytest.raises(fb.UnusableRun, match="its cache is not the one given now"):
        simulate(folder=tmp_path / "parts", resume=True, **{**settings, "cache": None})


def test_a_half_written_line_is_dropped_on_resume(tmp_path):
    simulate(folder=tmp_path / "whole")
    with pytest.raises(Interrupted):
        simulate(folder=tmp_path / "parts", on_round=interrupt_after(25))
    with (tmp_path / "parts" / "history.jsonl").open("a") as file:
        file.write('{"round": 26, "deci')

    simulate(folder=tmp_path / "parts", resume=True)

    assert folder_bytes(tmp_path / "parts") == folder_bytes(tmp_path / "whole")


def test_resuming_a_complete_run_changes_nothing(tmp_path):
    first = simulate(folder=tmp_path / "run")
    before = folder_bytes(tmp_path / "run")

    again = simulate(folder=tmp_path / "run", resume=True)

    assert folder_bytes(tmp_path / "run") == before
    assert again.clusters == first.clusters
    assert again.evaluation == first.evaluation


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"rounds": 6},
        {"participation": 0.5},
        {"evaluate_every": 2},
        {"training": fb.LocalTraining(optimizer=fb.sgd(0.31), epochs=2, batch_size=10)},
        {"training": fb.LocalTraining(optimizer=fb.sgd(0.3), epochs=2, batch_size=11)},
        {"rule": fb.NeverSplit()},
        {"clients": make_clients(joins=2)},
        {"clients": {**make_clients(5), "c5": make_clients()["c0"]}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_resuming_with_other_settings_or_data_is_refused(tmp_path, change):
    simulate(folder=tmp_path / "run", rounds=5)

    with pytest.raises(fb.UnusableRun, match=f"its {next(iter(change))} is not the one given"):
        simulate(folder=tmp_path / "run", resume=True, **{"rounds": 5, **change})


def test_resuming_from_another_initial_model_is_refused(tmp_path):
    settings = {"rule": RULE, "rounds": 2, "training": TRAINING, "folder": tmp_path / "run"}
    fb.simulate(make_model(seed=0), make_clients(), **settings)

    with pytest.raises(fb.UnusableRun, match="its initial_model is not the one given"):
        fb.simulate(make_model(seed=1), make_clients(), resume=True, **settings)


def test_an_existing_run_is_never_overwritten(tmp_path):
    simulate(folder=tmp_path / "run", rounds=1)

    with pytest.raises(fb.UnusableRun, match="already holds something"):
        simulate(folder=tmp_path / "run", rounds=1)


def test_the_folder_holds_what_the_run_returns(tmp_path):
    entries = []
    run = simulate(folder=tmp_path / "run", on_round=entries.append)
    folder = RunFolder(tmp_path / "run")

    assert run.path == folder.path
    assert folder.history() == entries
    assert run.history == entries
    assert folder.is_complete
    assert folder.summary["clusters"] == {str(k): v for k, v in run.clusters.items()}
    assert [client["id"] for client in folder.about["clients"]] == [f"c{i}" for i in range(6)]
    assert np.array_equal(folder.tree()[1].params, run.tree[1].params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 0}, "rounds is 0"),
        ({"clients": {}}, "clients is empty"),
        ({"participation": 0}, "participation is 0"),
        ({"participation": 1.1}, "participation is 1.1"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        simulate(**settings)


def test_two_simulations_cannot_write_into_one_folder(tmp_path):
    def start_another(entry):
        if entry.record.round == 2:
            simulate(rounds=4, folder=tmp_path, resume=True)

    with pytest.raises(fb.UnusableRun, match="another process is writing"):
        simulate(rounds=4, folder=tmp_path, on_round=start_another)

    assert len(simulate(rounds=4, folder=tmp_path, resume=True).history) == 4
