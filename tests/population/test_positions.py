"""Positions and presence in arrays against plain dicts."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import fedbranch.population.registry as registry
from fedbranch.population import ROUNDS_UNTIL_AWAY, Positions, Presence
from population.crowds import make_small

NODES = [0, 1, 2, 5]


IDS = [f"c{i}" for i in range(40)] + ["", "é", "日本", "\ud800", "a" * 300, "key-0f", "🙂"]


def collide(patch):
    """Make many ids have the same digest."""
    digests = registry._digests
    patch.setattr(registry, "_digests", lambda keys: digests(keys) % np.uint64(3))


class Dicts(RuleBasedStateMachine):
    """Positions and presence agree with two dicts after any calls, saves and loads."""

    has_collisions = False

    @initialize()
    def begin(self):
        self.patch = pytest.MonkeyPatch()
        make_small(self.patch)
        if self.has_collisions:
            collide(self.patch)
        self.positions, self.presence = Positions(), None
        self.presence = Presence(self.positions)
        self.node_of, self.seen, self.round = {}, {}, 1

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    ids = st.sampled_from(IDS)
    some_ids = st.lists(ids, unique=True, max_size=20)
    nodes = st.sampled_from(NODES)

    @rule(client_id=ids, node_id=nodes)
    def place(self, client_id, node_id):
        self.positions.place(client_id, node_id)
        self.node_of[client_id] = node_id

    @rule(client_ids=some_ids, node_id=nodes)
    def place_all(self, client_ids, node_id):
        self.positions.place_all(client_ids, node_id)
        self.node_of |= dict.fromkeys(client_ids, node_id)

    @rule(client_ids=some_ids)
    def remove(self, client_ids):
        self.positions.remove(client_ids)
        for client_id in client_ids:
            self.node_of.pop(client_id, None)
            self.seen.pop(client_id, None)

    @rule(from_nodes=st.sets(nodes), node_id=nodes)
    def move_all(self, from_nodes, node_id):
        self.positions.move_all(from_nodes, node_id)
        for client_id, at in self.node_of.items():
            if at in from_nodes:
                self.node_of[client_id] = node_id

    @rule(client_ids=some_ids)
    def mark(self, client_ids):
        there = [i for i in client_ids if i in self.node_of]
        self.presence.mark(there, self.round)
        for client_id in self.node_of:
            self.seen.setdefault(client_id, self.round)
        self.seen |= dict.fromkeys(there, self.round)

    @rule(number=st.integers(1, ROUNDS_UNTIL_AWAY))
    def go_on(self, number):
        self.round += number

    @rule()
    def save_and_read(self):
        state, files = self.positions.to_state()
        is_known, of_presence = self.presence.to_state()
        self.positions = Positions.from_state(state, files, NODES)
        self.presence = Presence.from_state(is_known, of_presence, self.positions, self.round)
        again, files_again = self.positions.to_state()
        assert again == state
        assert self.presence.to_state()[0] == is_known
        for before, after in [(files, files_again), (of_presence, self.presence.to_state()[1])]:
            assert before.keys() == after.keys()
            for name, tensors in before.items():
                assert {k: v.tolist() for k, v in tensors.items()} == {
                    k: v.tolist() for k, v in after[name].items()
                }

    @invariant()
    def they_agree_with_the_dicts(self):
        if not hasattr(self, "positions"):
            return
        self.presence.count_out(self.round)
        positions, node_of = self.positions, self.node_of
        since = self.round - ROUNDS_UNTIL_AWAY
        away = {i for i, seen in self.seen.items() if seen <= since}
        assert len(positions) == len(node_of)
        assert positions.client_ids == sorted(node_of)
        assert {i: positions.of(i) for i in IDS} == {i: node_of.get(i) for i in IDS}
        assert {i for i in IDS if positions.is_away(i)} == away
        assert positions.missing(IDS) == [i for i in IDS if i not in node_of]
        among = positions.among(IDS, NODES, away=False)
        for node_id in NODES:
            members = sorted(i for i, at in node_of.items() if at == node_id)
            present = [i for i in members if i not in away]
            assert positions.members([node_id]) == members
            assert positions.members([node_id], away=False) == among[node_id] == present
            assert positions.num_members(node_id) == len(members)
            assert positions.num_away(node_id) == len(members) - len(present)
        assert positions.members(NODES[:2]) == sorted(i for i, at in node_of.items() if at < 2)


class DictsWithCollisions(Dicts):
    """The same, where many ids have the same digest."""

    has_collisions = True


TestDicts = Dicts.TestCase


TestDictsWithCollisions = DictsWithCollisions.TestCase


TestDicts.settings = TestDictsWithCollisions.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, derandomize=True, database=None
)
