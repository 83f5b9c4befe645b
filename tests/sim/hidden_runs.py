"""A simulation of real digits in which the server may know hidden numbers only."""

from functools import cache

import torch
from torch import nn

import fedbranch as fb
from fedbranch.data import digits, label_swaps
from fedbranch.privacy import Noise, Privacy, Secret

SECRET = Secret(bytes(range(7, 39)), "tests", epoch=3)
PERMUTATION = Privacy(SECRET, transform="permutation")
ROTATION = Privacy(SECRET)
NOISE = Noise(clip=1.0, multiplier=0.05)
THRESHOLDS = fb.Thresholds(eps_mean=0.3, eps_max=0.5, gamma_max=0.5)
RULES = {"thresholds": THRESHOLDS, "auto": fb.AutoRule()}
ROUNDS, JOINS = 22, 18  # all splits are before the newcomer joins
NEWCOMER = "newcomer"


@cache
def clients():
    """Make two groups of clients with real digits, and one client that joins after their split."""
    found = fb.federate(*digits(), num_clients=9, groups=label_swaps(2, seed=0), seed=0)
    last = found.pop(max(found))
    newcomer = fb.ClientData(tuple(last.train), tuple(last.test), group=last.group, joins=JOINS)
    return found | {NEWCOMER: newcomer}


def with_batch_norm():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10)
        )


def smooth():
    """Make a model without relu: training does not amplify rounding."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


MODELS = {"smooth": smooth, "BatchNorm": with_batch_norm}


def simulate(privacy=None, *, model="smooth", rule="thresholds", method=fb.simulate, **settings):
    settings = {
        "rounds": ROUNDS,
        "training": fb.LocalTraining(optimizer=fb.sgd(0.2), epochs=2, batch_size=36),
        "engine": "vectorised",
        "evaluate_every": ROUNDS,
        "seed": 5,
        **({"rule": RULES[rule]} if method is fb.simulate else {}),
        **settings,
    }
    return method(MODELS[model](), clients(), privacy=privacy, **settings)


@cache
def plain_run(model, rule, engine):
    return simulate(model=model, rule=rule, engine=engine)


def decisions(run):
    """Return the server's decisions, without its measurements."""
    return [
        (entry.record.round, d.node_id, d.verdict, d.asks, d.groups)
        for entry in run.history
        for d in entry.record.decisions
    ]


def moves(run):
    return [
        (entry.record.round, move.client_id, move.from_node, move.to_node)
        for entry in run.history
        for move in entry.record.routed
    ]


def largest_difference(run, other):
    """Compute the largest difference between the models at all nodes of two runs."""
    assert len(run.tree) == len(other.tree)
    return max(
        float((ours.double() - theirs.double()).abs().max())
        for node in run.tree
        for ours, theirs in zip(
            run.model_at(node.id).state_dict().values(),
            other.model_at(node.id).state_dict().values(),
            strict=True,
        )
    )


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
