"""In any order of events the state of the server stays sound."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fakes import DIM, QuadraticClients
from fedbranch import Server, Thresholds, Update
from server.made_servers import server_for


class Federation(RuleBasedStateMachine):
    """Clients come, answer, lie, leave and return in any order; the server is saved and loaded."""

    def __init__(self):
        super().__init__()
        self.clients = QuadraticClients(num_groups=3, clients_per_group=3)
        self.server = server_for(
            self.clients,
            Thresholds(eps_mean=0.8, eps_max=0.5, gamma_max=0.5, coverage=0.7, max_hold_rounds=3),
        )

    @rule(asked=st.sets(st.integers(0, 8)))
    def play(self, asked):
        ids = [self.clients.client_ids[i] for i in sorted(asked)]
        before = {i: self.server.tree.position(i) for i in ids if i in self.server.tree}
        record = self.clients.play_round(self.server, ids)
        assert not record.refused
        for decision in record.splits:
            answered = sum(len(group) for group in decision.groups)
            assert answered >= 0.7 * decision.measurements["num_members"] - 1e-9
        for client_id, node_id in before.items():
            path = [n.id for n in self.server.tree.path(self.server.tree.position(client_id))]
            assert node_id in path  # clients only move down

    @rule(sender=st.integers(0, 8), entry=st.sampled_from([np.nan, np.inf, 0.0]))
    def lie(self, sender, entry):
        client_id = self.clients.client_ids[sender]
        tasks = self.server.plan([client_id])
        vector = np.full(DIM, entry, dtype=np.float32)
        params = {node.id: node.params.copy() for node in self.server.tree}
        record = self.server.step({i: Update(vector, 1) for i in tasks})
        assert set(record.refused) == set(tasks)
        held = {d.node_id for d in record.decisions}
        for node_id, before in params.items():
            assert node_id in held or np.array_equal(before, self.server.tree[node_id].params)

    @precondition(lambda self: self.server.tree.client_ids)
    @rule(data=st.data())
    def leave(self, data):
        self.server.remove([data.draw(st.sampled_from(self.server.tree.client_ids))])

    @precondition(lambda self: self.server.tree.client_ids)
    @rule(data=st.data())
    def reroute(self, data):
        self.server.reroute([data.draw(st.sampled_from(self.server.tree.client_ids))])

    @precondition(lambda self: not self.server.tree.root.is_leaf)
    @rule(data=st.data())
    def undo(self, data):
        inner = [node.id for node in self.server.tree if not node.is_leaf]
        self.server.undo_split(data.draw(st.sampled_from(inner)))

    @rule()
    def save_and_load(self):
        state, files = self.server.to_state()
        self.server = Server.from_state(state, files)

    @invariant()
    def every_client_has_exactly_one_position(self):
        tree = self.server.tree
        members = [i for node in tree for i in tree.members(node.id)]
        assert sorted(members) == tree.client_ids
        assert all(i in tree.members(tree.position(i)) for i in tree.client_ids)

    @invariant()
    def the_tree_is_sound(self):
        self.server.tree.check()
        assert all(np.isfinite(node.params).all() for node in self.server.tree)

    @invariant()
    def only_leaves_collect_and_only_members_are_collected(self):
        for node_id, leaf in self.server.state.leaves.items():
            assert self.server.tree[node_id].is_leaf
            replies = () if leaf.store is None else leaf.store.replies
            assert set(replies) <= set(self.server.tree.members(node_id))
            assert leaf.stands_still or not replies


Federation.TestCase.settings = settings(max_examples=60, stateful_step_count=40)


TestFederation = Federation.TestCase
