"""The models on a client's path: the best of them, and all of them as one."""

from itertools import pairwise

import pytest
import torch

import fedbranch as fb
from fedbranch.sim.clients import SimulatedClients
from fedbranch.training.client import evaluate
from sim.two_groups import TRAINING, make_clients, simulate


@pytest.fixture(scope="module", params=["workers", "vectorised"])
def run(request):
    """Run two clusters below the root; c0 validates on data of the other cluster, c1 has none."""
    clients = make_clients()
    clients["c0"] = fb.ClientData(
        clients["c0"].train, clients["c0"].test, validation=clients["c1"].test
    )
    clients["c1"] = fb.ClientData(clients["c1"].train)
    return simulate(clients, engine=request.param, rounds=8, evaluate_every=8)


def data_of(run, client_id):
    return run._clients.clients[client_id]


def test_a_path_leads_from_the_root_to_the_clients_position(run):
    for leaf, client_ids in run.clusters.items():
        for client_id in client_ids:
            path = run.path_of(client_id)
            assert path[0] == run.tree.root.id
            assert path[-1] == leaf
            for parent, child in pairwise(path):
                assert child in run.tree[parent].child_ids
    with pytest.raises(ValueError, match="'stranger' has no position"):
        run.path_of("stranger")


@pytest.mark.parametrize("part", ["validation", "test"])
def test_every_client_is_measured_under_every_model_on_its_path(run, part):
    measured = run.evaluation_on_path(part)

    assert sorted(measured) == ["c0", "c2", "c3", "c4", "c5"]  # c1 has no held-out data
    assert run._clients.engine.name != "workers"  # no worker is started again
    for client_id, by_node in measured.items():
        assert list(by_node) == run.path_of(client_id)
        client = data_of(run, client_id)
        data = client.held_out if part == "validation" else client.test
        for node_id, metrics in by_node.items():
            expected = evaluate(run.model_at(node_id), data, TRAINING)
            assert metrics == pytest.approx(expected, rel=1e-5)
        if part == "test":
            own = run.tree.position(client_id)
            assert by_node[own] == pytest.approx(run.evaluation[client_id], rel=1e-5)


def test_the_best_model_has_the_smallest_loss_on_validation_examples(run):
    best = run.best_on_path()

    measured = run.evaluation_on_path("validation")
    for client_id, by_node in measured.items():
        smallest = min(metrics["loss"] for metrics in by_node.values())
        assert by_node[best[client_id]]["loss"] == smallest
    assert best["c0"] == run.tree.root.id  # its own leaf learned the opposite of its data
    assert best["c2"] == run.tree.position("c2")
    assert best["c1"] == run.tree.position("c1")  # it has no data to decide on


@pytest.mark.parametrize("loss", [0.5, None])
def test_of_equally_good_models_the_most_specific_is_best(run, monkeypatch, loss):
    def measured(self, at, part):
        return {client_id: {"loss": loss} for client_id in at}

    monkeypatch.setattr(SimulatedClients, "measured", measured)

    assert run.best_on_path() == {i: run.tree.position(i) for i in run.tree.client_ids}


def test_a_model_whose_loss_is_not_finite_is_not_the_best(run, monkeypatch):
    def measured(self, at, part):
        return {i: {"loss": None if node.is_leaf else 9.0} for i, node in at.items()}

    monkeypatch.setattr(SimulatedClients, "measured", measured)

    assert all(run.tree[node_id].child_ids for node_id in run.best_on_path().values())


def test_an_ensemble_averages_probabilities(run):
    x = torch.tensor(data_of(run, "c2").test.x)
    path = run.path_of("c2")
    assert len(path) == 2
    alone = [run.model_at(node_id)(x).softmax(dim=1) for node_id in path]

    ensemble = run.ensemble("c2")

    assert not any(module.training for module in ensemble.modules())
    torch.testing.assert_close(ensemble(x).exp(), (alone[0] + alone[1]) / 2)
    torch.testing.assert_close(run.ensemble("c2", path[1:])(x).exp(), alone[1])
    with pytest.raises(ValueError, match="at least one model"):
        run.ensemble("c2", [])


def test_ensembles_are_evaluated_on_test_examples(run):
    evaluation = run.ensemble_evaluation()

    assert list(evaluation) == ["c0", "c2", "c3", "c4", "c5"]
    for client_id, metrics in evaluation.items():
        x, y = map(torch.tensor, data_of(run, client_id).test)
        alone = [run.model_at(i)(x).softmax(dim=1) for i in run.path_of(client_id)]
        probabilities = torch.stack(alone).mean(dim=0)
        loss = -probabilities[torch.arange(len(y)), y].log().mean().item()
        assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
        right = (probabilities.argmax(dim=1) == y).float().mean().item()
        assert metrics["accuracy"] == pytest.approx(right)
