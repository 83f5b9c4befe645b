import copy

import numpy as np
import pytest
import torch

import fedbranch as fb
from fedbranch.training.client import local_update
from fedbranch.training.model_state import ModelState
from fedbranch.training.seeds import stream_seed
from sim.two_groups import TRAINING, folder_bytes, make_clients, make_model, simulate

SETTINGS = {"rounds": 15, "training": TRAINING, "seed": 3}


def test_fedavg_is_one_model_for_all():
    run = fb.fedavg(make_model(), make_clients(), **SETTINGS)

    assert run.clusters == {0: [f"c{i}" for i in range(6)]}
    accuracy = [metrics["accuracy"] for metrics in run.evaluation.values()]
    assert np.mean(accuracy) < 0.6


def test_cfl_before_its_first_split_is_fedavg():
    never = fb.Thresholds(eps_mean=1e-9, eps_max=1, gamma_max=0.5)
    cfl = fb.simulate(make_model(), make_clients(), rule=never, **SETTINGS)
    fedavg = fb.fedavg(make_model(), make_clients(), **SETTINGS)

    assert np.array_equal(cfl.tree.root.params, fedavg.tree.root.params)


def test_local_is_every_client_training_alone():
    clients, model = make_clients(), make_model()
    initial = ModelState.of(model)
    run = fb.local(model, clients, **SETTINGS, engine="reference")

    server = fb.Server(len(initial.params), rule=fb.NeverSplit())
    for number in range(1, 16):
        task = server.plan(["c4"])["c4"]
        seed = stream_seed(3, number, "c4")
        update = local_update(
            copy.deepcopy(model), initial, task, clients["c4"].train, TRAINING, seed=seed
        )
        server.step({"c4": update})

    assert sorted(run.clusters.values()) == [[f"c{i}"] for i in range(6)]
    position = run.tree.position("c4")
    assert np.array_equal(run.tree[position].params, server.tree.root.params)


def test_the_oracle_knows_the_groups():
    run = fb.oracle(make_model(), make_clients(), **SETTINGS)

    assert sorted(run.clusters.values()) == [["c0", "c2", "c4"], ["c1", "c3", "c5"]]
    assert min(metrics["accuracy"] for metrics in run.evaluation.values()) > 0.8


def test_the_oracle_needs_groups():
    clients = {"a": fb.ClientData(([[0.0, 0.0, 0.0]], [0]))}

    with pytest.raises(ValueError, match="client 'a' has no group"):
        fb.oracle(make_model(), clients, **SETTINGS)


def test_one_group_makes_the_oracle_plain_fedavg():
    clients = make_clients()
    same = {
        i: fb.ClientData((c.train.x, c.train.y), (c.test.x, c.test.y), group="all")
        for i, c in clients.items()
    }

    oracle = fb.oracle(make_model(), same, **SETTINGS)
    fedavg = fb.fedavg(make_model(), same, **SETTINGS)

    assert np.array_equal(oracle.tree.root.params, fedavg.tree.root.params)


def test_ifca_finds_two_groups_when_told_that_there_are_two():
    run = fb.ifca(make_model(), make_clients(), num_clusters=2, **{**SETTINGS, "rounds": 30})

    assert sorted(run.clusters.values()) == [["c0", "c2", "c4"], ["c1", "c3", "c5"]]
    assert min(metrics["accuracy"] for metrics in run.evaluation.values()) > 0.8


def test_ifca_with_one_cluster_is_fedavg():
    ifca = fb.ifca(make_model(), make_clients(), num_clusters=1, **SETTINGS)
    fedavg = fb.fedavg(make_model(), make_clients(), **SETTINGS)

    assert np.array_equal(ifca.tree.root.params, fedavg.tree.root.params)


def test_ifca_resumes_to_the_same_bytes(tmp_path):
    def run(folder, **more):
        settings = {**SETTINGS, "participation": 0.5, "checkpoint_every": 3, **more}
        fb.ifca(make_model(), make_clients(), num_clusters=2, folder=folder, **settings)

    def interrupt(entry):
        if entry.record.round == 8:
            raise KeyboardInterrupt

    run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", on_round=interrupt)
    run(tmp_path / "parts", resume=True)

    assert folder_bytes(tmp_path / "parts") == folder_bytes(tmp_path / "whole")


def test_ifca_needs_layers_that_can_be_initialised_again():
    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 2))

        def forward(self, x):
            return x @ self.weight

    with pytest.raises(ValueError, match=r"no layer of Fixed has reset_parameters\(\)"):
        fb.ifca(Fixed(), make_clients(), num_clusters=2, **SETTINGS)


def test_no_client_chooses_a_model_that_has_diverged():
    model = make_model()
    with torch.no_grad():
        model[2].weight.fill_(1e38)  # the outputs, and so the loss, are not finite

    run = fb.ifca(model, make_clients(), num_clusters=2, rounds=1)

    assert list(run.clusters.values()) == [[], [f"c{i}" for i in range(6)]]


def test_ifca_needs_a_cluster():
    with pytest.raises(ValueError, match="num_clusters is 0"):
        fb.ifca(make_model(), make_clients(), num_clusters=0, **SETTINGS)


def test_late_clients_find_their_given_cluster():
    run = fb.oracle(make_model(), make_clients(joins=5), **SETTINGS)

    assert sorted(run.clusters.values()) == [["c0", "c2", "c4"], ["c1", "c3", "c5"]]
    assert "c5" not in run.history[3].evaluation
    assert run.history[4].record.joined == ("c5",)
    assert "c5" not in run.history[3].record.metrics
    assert "c5" in run.history[4].record.metrics


def test_clustered_learning_beats_federated_averaging():
    def mean(run):
        return np.mean([metrics["accuracy"] for metrics in run.evaluation.values()])

    assert mean(simulate()) > mean(fb.fedavg(make_model(), make_clients(), **SETTINGS)) + 0.2
