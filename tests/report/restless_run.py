"""A server whose rule splits, merges and moves at random, with clients that come and go."""

import numpy as np

import fedbranch as fb
from fedbranch.rules import Decision
from fedbranch.runs import Round

DIM = 4


class Restless:
    """Splits any cluster of four clients at random; merges or moves at random two rounds later."""

    review_after = (2,)

    def examine(self, evidence):
        rng = np.random.default_rng([evidence.round, evidence.node_id])
        ids = list(evidence.client_ids)
        if len(ids) < 4 or rng.random() < 0.5:
            return self._decision(evidence, "train")
        sides = rng.permutation(np.arange(len(ids)) % 2)
        groups = tuple(tuple(i for i, s in zip(ids, sides, strict=True) if s == k) for k in (0, 1))
        return self._decision(evidence, "split", groups=groups)

    def review(self, review):
        rng = np.random.default_rng([review.round, review.node_id, 1])
        if rng.random() < 0.4:
            return self._decision(review, "merge")
        leaf_ids = list(review.clusters)
        moved = [i for leaf_id in leaf_ids for i in review.clusters[leaf_id] if rng.random() < 0.3]
        moves = {i: int(rng.choice(leaf_ids)) for i in moved}
        return self._decision(review, "keep", moves=moves)

    def _decision(self, about, verdict, **more):
        number = about.round
        return Decision(node_id=about.node_id, round=number, verdict=verdict, reason="", **more)


class RestlessRun:
    """Rounds of a server in which half of the clients take part, and some join or leave.

    With ``from_outside``, splits are undone, clients rerouted and placed between the rounds, of
    which the decisions say nothing.
    """

    def __init__(self, seed, *, from_outside=False, given=0):
        self.rng = np.random.default_rng(seed)
        self.from_outside = from_outside
        self.server = fb.Server(DIM, rule=Restless())
        self.present = [f"c{i}" for i in range(24)]
        if given:
            names = {str(k): self.present[k::given] for k in range(given)}
            self.server.partition(names)
        self.num_clients = len(self.present)
        self.history = []

    def play(self, num_rounds):
        for _ in range(num_rounds):
            self._come_and_go()
            asked = [i for i in self.present if self.rng.random() < 0.5]
            tasks = self.server.plan(asked)
            trials = self.server.trials(asked)
            record = self.server.step(
                {
                    i: fb.Update(self.rng.normal(size=DIM).astype(np.float32), 10, base=task.base)
                    for i, task in tasks.items()
                },
                losses={i: [0.5] * len(models) for i, models in trials.items()},
            )
            self.history.append(Round(record=record))
            yield record

    def _come_and_go(self):
        if self.rng.random() < 0.3:
            self.present.append(f"c{self.num_clients}")
            self.num_clients += 1
        if self.rng.random() < 0.3 and len(self.present) > 8:
            gone = self.present.pop(int(self.rng.integers(len(self.present))))
            if gone in self.server.tree:
                self.server.remove([gone])
        if self.from_outside and self.server.round > 0:
            self._interfere()

    def _interfere(self):
        inner = [n.id for n in self.server.tree if n.child_ids and n.split_in_round > 0]
        if inner and self.rng.random() < 0.2:
            self.server.undo_split(int(self.rng.choice(inner)))
        known = self.server.tree.client_ids
        leaf_ids = [leaf.id for leaf in self.server.tree.leaves]
        if self.rng.random() < 0.3:
            self.server.place({str(self.rng.choice(known)): int(self.rng.choice(leaf_ids))})
