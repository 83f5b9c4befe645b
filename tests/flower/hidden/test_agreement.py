"""Nodes agree on a secret over a server that they do not trust."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbranch.errors import AgreementFailed, FederationStalled, NotConfirmed
from fedbranch.flower import (
    Agreed,
    AgreementMod,
    ClusteredStrategy,
    agree,
    hidden_arrays,
    transform_mod,
)
from fedbranch.flower.testing import FakeGrid, FakeNode
from fedbranch.privacy import Identity, Member, Roster
from flower.federations import RULE, make_client_app, make_clients, make_model
from flower.hiding import initial, overhearing, start, theta0, watching
from flower.test_ray import ENVIRONMENT
from flower.wire_scan import Overheard

IDENTITIES = [Identity.new() for _ in range(6)]
ROSTER = Roster("test", {identity.fingerprint for identity in IDENTITIES})
NODES = [FakeNode.simulated(i, 6) for i in range(6)]


def identity_of(context):
    return IDENTITIES[context.node_config["partition-id"]]


def make_agreeing_grid(*, nodes=NODES, roster=ROSTER, identity=identity_of, folder=None, mods=()):
    agreement = AgreementMod(identity, roster, folder)
    mod = transform_mod(agreement.secret, initial)
    app = make_client_app(make_clients(6), make_model(), [mod, *mods])
    app.query("fedbranch")(agreement)
    return FakeGrid(app, nodes), agreement


def secrets_of(grid, agreement):
    """Node id -> the secret that the node would use."""
    secrets = {}
    for node_id, context in grid._contexts.items():
        with contextlib.suppress(AgreementFailed):
            secrets[node_id] = agreement.secret(context)
    return secrets


def test_nodes_agree_and_train_with_what_they_agreed_on():
    seen = []
    grid, agreement = make_agreeing_grid(mods=[watching(seen)])
    overheard = Overheard()
    grid.on_reply = overhearing(overheard)

    agreed = agree(grid, min_nodes=6, timeout=4)
    arrays = hidden_arrays(theta0(initial), fingerprint=agreed.fingerprint)
    result = start(grid, arrays, rule=None, num_rounds=5)

    (secret,) = set(secrets_of(grid, agreement).values())
    assert agreed.fingerprint == secret.fingerprint
    assert set(agreed.members.values()) == ROSTER.members
    assert agreed.refused == {}
    assert sorted(result.clusters.values()) == [
        [f"partition-{i:04d}" for i in group] for group in ([0, 2, 4], [1, 3, 5])
    ]
    assert not overheard.holds_key(secret)
    assert overheard.num_plain_runs(seen) == 0
    # Cards, one sealer, five envelopes, six checks.
    assert sum(m.metadata.message_type == "query.fedbranch" for m in grid.sent) == 18


def test_what_a_node_remembers_is_closed_to_the_engine_that_keeps_it():
    grid, agreement = make_agreeing_grid()
    agree(grid, min_nodes=6, timeout=4)

    (secret,) = set(secrets_of(grid, agreement).values())
    kept = Overheard()
    for context in grid._contexts.values():
        kept.add(*(r["memory"] for r in context.state.config_records.values()))

    assert len(kept.parts) == 6
    assert not kept.holds_key(secret)


def test_nodes_that_remember_in_a_folder_agree_on_the_same_secret_in_the_next_run(tmp_path):
    def folder(context):
        return tmp_path / str(context.node_config["partition-id"])

    first = agree(make_agreeing_grid(folder=folder)[0], min_nodes=6, timeout=4)

    again = agree(make_agreeing_grid(folder=folder)[0], min_nodes=6, timeout=4)

    assert again.fingerprint == first.fingerprint
    files = list(tmp_path.rglob("*/fedbranch-agreement-*"))
    assert len(files) == 6
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert agree(make_agreeing_grid()[0], 6, 4).fingerprint != first.fingerprint


def test_nodes_may_share_a_folder_given_as_text(tmp_path):
    grid, agreement = make_agreeing_grid(folder=str(tmp_path / "of-all"))

    agreed = agree(grid, min_nodes=6, timeout=4)

    assert len(agreed.members) == 6
    assert len(set(secrets_of(grid, agreement).values())) == 1
    names = {path.name for path in (tmp_path / "of-all").iterdir()} - {"lock"}
    assert {name.split("-")[-1] for name in names} == {
        identity.fingerprint[:32] for identity in IDENTITIES
    }


def asked_in_a_new_run(agreement, **record):
    """What the first node answers at the beginning of a run of Flower."""
    app = ClientApp(client_fn=lambda context: None, mods=[agreement])
    grid = FakeGrid(app, [NODES[0]])
    content = RecordDict({"fedbranch-agreement": ConfigRecord(record)})
    (reply,) = grid.send_and_receive([Message(content, NODES[0].node_id, "query.fedbranch")])
    return reply


@pytest.mark.parametrize("has_folder", [True, False])
def test_only_a_folder_keeps_a_second_run_of_flower_from_bringing_a_second_secret(
    has_folder, tmp_path
):
    agreement = AgreementMod(identity_of, ROSTER, tmp_path if has_folder else None)

    first, second = (
        agreement_record(asked_in_a_new_run(agreement, step="seal", cards=[])) for _ in range(2)
    )

    assert (first["confirmation"] == second["confirmation"]) == has_folder


def test_a_folder_must_be_given_or_renounced():
    with pytest.raises(TypeError, match="folder"):
        AgreementMod(identity_of, ROSTER)


def test_messages_that_come_at_once_bring_one_secret(tmp_path):
    waiting = threading.Barrier(2)

    class Slow(AgreementMod):
        def _remember(self, member, context):
            with contextlib.suppress(threading.BrokenBarrierError):
                waiting.wait(timeout=0.5)  # until both have drawn one, if both may
            super()._remember(member, context)

    agreement = Slow(identity_of, ROSTER, tmp_path)
    confirmations = []

    def seal():
        reply = asked_in_a_new_run(agreement, step="seal", cards=[])
        confirmations.append(agreement_record(reply)["confirmation"])

    threads = [threading.Thread(target=seal) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(confirmations) == 2
    assert len(set(confirmations)) == 1


def test_the_server_is_not_told_where_a_node_keeps_its_identity(tmp_path):
    def identity(context):
        return Identity.from_pem((tmp_path / "ward-7.pem").read_bytes())

    reply = asked_in_a_new_run(AgreementMod(identity, ROSTER, None), step="card")

    assert "the key agreement raised FileNotFoundError" in reply.error.reason
    assert "ward-7" not in reply.error.reason


def test_a_late_node_gets_the_secret_from_a_member_while_the_run_goes_on():
    grid, agreement = make_agreeing_grid()
    late = grid.disconnect(NODES[5].node_id)
    agreed = agree(grid, min_nodes=5, timeout=4)
    arrays = hidden_arrays(theta0(initial), fingerprint=agreed.fingerprint)

    class Welcoming(ClusteredStrategy):
        agreed: Agreed

        def configure_train(self, server_round, arrays, config, grid):
            if server_round == 5:
                grid.connect(late)
            self.agreed = agree(grid, timeout=4, before=self.agreed)
            return super().configure_train(server_round, arrays, config, grid)

    Welcoming.agreed = agreed
    result = start(grid, arrays, rule=None, num_rounds=7, strategy_class=Welcoming)

    assert len(set(secrets_of(grid, agreement).values())) == 1
    assert len(secrets_of(grid, agreement)) == 6
    assert result.assignments["partition-0005"] == result.assignments["partition-0001"]
    # Only the new node is asked, and one member for an envelope.
    assert sum(m.metadata.message_type == "query.fedbranch" for m in grid.sent) == 15 + 3


def test_a_node_that_forgot_gets_the_secret_again_from_whoever_answers():
    grid, agreement = make_agreeing_grid()
    agreed = agree(grid, min_nodes=6, timeout=4)
    forgetful, silent = NODES[2], sorted(agreed.members, key=agreed.members.get)[0]
    if forgetful.node_id == silent:
        forgetful = NODES[3]
    grid._contexts.pop(forgetful.node_id)
    grid.connect(dataclasses.replace(forgetful, last_activated_at="later"))
    grid.on_reply = lambda m, reply: None if m.metadata.dst_node_id == silent else reply

    again = agree(grid, min_nodes=6, timeout=1, before=agreed)

    assert again.members == agreed.members
    assert again.fingerprint == agreed.fingerprint
    assert again.refused == {}
    assert len(set(secrets_of(grid, agreement).values())) == 1
    assert len(secrets_of(grid, agreement)) == 6


def test_a_node_that_was_never_asked_does_not_train():
    grid, _ = make_agreeing_grid()
    agreed = agree(make_agreeing_grid()[0], min_nodes=6, timeout=4)
    replies = []
    grid.on_reply = lambda message, reply: replies.append(reply)

    strategy = ClusteredStrategy(rule=RULE, fraction_evaluate=0.0)
    strategy.start(
        grid, hidden_arrays(theta0(initial), fingerprint=agreed.fingerprint), 1, timeout=0.1
    )

    assert len(replies) == 6
    for reply in replies:
        assert "NotConfirmed" in reply.error.reason
        assert "has no secret yet; it needs an envelope" in reply.error.reason


def agreement_record(message):
    return message.content.config_records["fedbranch-agreement"]


class HostileRelay(FakeGrid):
    """Changes what it passes on: ``change(step, record, node_id)`` gives another record."""

    def __init__(self, grid, change):
        super().__init__(grid.client_app, grid.nodes.values())
        self.change = change

    def push_messages(self, messages):
        for message in messages:
            record = message.content.config_records.get("fedbranch-agreement")
            if record is not None:
                self.change(record["step"], record, message.metadata.dst_node_id)
        return super().push_messages(messages)


def swapped_envelopes():
    """Nodes get each other's envelopes."""
    held = []

    def change(step, record, node_id):
        if step == "open":
            held.append((record, record["envelopes"]))
            if len(held) == 2:
                (one, first), (other, second) = held
                one["envelopes"], other["envelopes"] = second, first
                held.clear()

    return change, "WrongRecipient"


def changed_envelope():
    """One envelope has another byte."""

    def change(step, record, node_id):
        if step == "open" and node_id == victim():
            (envelope,) = record["envelopes"]
            record["envelopes"] = [envelope[:-40] + bytes([envelope[-40] ^ 1]) + envelope[-39:]]

    return change, "DamagedMessage"


def cut_envelope():
    def change(step, record, node_id):
        if step == "open" and node_id == victim():
            record["envelopes"] = [record["envelopes"][0][:100]]

    return change, "DamagedMessage"


def a_card_of_the_servers_own():
    """The server puts a key of its own among the cards."""
    stranger = Identity.new()
    card = Member(stranger, Roster("test", {*ROSTER.members, stranger.fingerprint})).card()

    def change(step, record, node_id):
        if step == "seal":
            record["cards"] = [*record["cards"][:-1], card]

    return change, "NotInRoster"


def confirmations_of_another_secret():
    def change(step, record, node_id):
        if step == "check":
            record["confirmations"] = [c[:-1] + bytes([c[-1] ^ 1]) for c in record["confirmations"]]

    return change, "SplitView"


def victim():
    """The node of the highest fingerprint, which never leads."""
    last = max(range(6), key=lambda i: IDENTITIES[i].fingerprint)
    return NODES[last].node_id


@pytest.mark.parametrize(
    "attack",
    [
        swapped_envelopes,
        changed_envelope,
        cut_envelope,
        a_card_of_the_servers_own,
        confirmations_of_another_secret,
    ],
)
def test_a_hostile_relay_keeps_the_run_from_starting_and_learns_nothing(attack):
    honest, agreement = make_agreeing_grid()
    change, error = attack()
    grid = HostileRelay(honest, change)
    overheard = Overheard()
    replies = []

    def on_reply(message, reply):
        replies.append(reply)
        return overhearing(overheard)(message, reply)

    grid.on_reply = on_reply
    with pytest.raises(NotConfirmed, match=f"and 6 are needed: .*{error}"):
        agree(grid, min_nodes=6, timeout=4)

    secrets = secrets_of(grid, agreement)
    assert len(secrets) < 6
    for secret in {*secrets.values()}:
        assert not overheard.holds_key(secret)
    # If the server goes on all the same, a node without the secret sends nothing but the reason.
    replies.clear()
    ClusteredStrategy(rule=RULE, fraction_evaluate=0.0).start(
        grid, hidden_arrays(theta0(initial), fingerprint=None), 1, timeout=0.2
    )
    for reply in replies:
        has_secret = reply.metadata.src_node_id in secrets
        assert reply.has_content() == has_secret
        assert has_secret or "NotConfirmed" in reply.error.reason


LEADER = NODES[min(range(6), key=lambda i: IDENTITIES[i].fingerprint)]


def without_the_leaders_envelopes(message, reply):
    is_seal = agreement_record(message)["step"] == "seal"
    return None if is_seal and message.metadata.dst_node_id == LEADER.node_id else reply


def test_another_node_draws_the_secret_if_the_leader_vanishes():
    grid, agreement = make_agreeing_grid()
    grid.on_reply = without_the_leaders_envelopes

    agreed = agree(grid, min_nodes=5, timeout=1)

    assert len(agreed.members) == 5
    assert agreed.refused == {LEADER.node_id: "no answer in time"}
    # It has drawn a secret that no other node has, and takes the others' when it is back.
    grid.on_reply = None
    grid.connect(dataclasses.replace(LEADER, last_activated_at="later"))
    again = agree(grid, min_nodes=6, timeout=4, before=agreed)
    assert again.refused == {}
    assert len(set(secrets_of(grid, agreement).values())) == 1


def test_members_with_different_secrets_agree_on_the_one_that_most_have():
    honest, agreement = make_agreeing_grid()

    def change(step, record, node_id):
        if step == "check":
            record["confirmations"] = []

    grid = HostileRelay(honest, change)
    grid.on_reply = without_the_leaders_envelopes
    with pytest.raises(NotConfirmed, match="the server passed on no confirmations"):
        agree(grid, min_nodes=5, timeout=1)
    assert secrets_of(grid, agreement) == {}

    grid.change, grid.on_reply = lambda step, record, node_id: None, None
    agreed = agree(grid, min_nodes=6, timeout=4)

    assert agreed.refused == {}
    assert len(set(secrets_of(grid, agreement).values())) == 1


def test_a_node_with_another_roster_is_left_out():
    other = ROSTER.without(IDENTITIES[5].fingerprint)
    grid, _ = make_agreeing_grid(
        roster=lambda context: other if context.node_config["partition-id"] == 0 else ROSTER
    )

    agreed = agree(grid, min_nodes=5, timeout=4)

    assert list(agreed.refused) == [NODES[0].node_id]
    assert "it has another roster" in agreed.refused[NODES[0].node_id]


def test_a_stranger_is_left_out():
    stranger = Identity.new()

    def identity(context):
        return stranger if context.node_config["partition-id"] == 0 else identity_of(context)

    agreed = agree(make_agreeing_grid(identity=identity)[0], min_nodes=5, timeout=4)

    assert "NotInRoster" in agreed.refused[NODES[0].node_id]
    assert stranger.fingerprint not in agreed.members.values()


def test_less_than_half_of_the_roster_is_not_enough():
    grid, _ = make_agreeing_grid(nodes=NODES[:3])

    with pytest.raises(NotConfirmed, match="0 nodes of 3 have agreed on a secret, and 2 are"):
        agree(grid, timeout=4)


def test_too_few_nodes_stall_the_agreement():
    grid, _ = make_agreeing_grid(nodes=NODES[:3])

    with pytest.raises(FederationStalled, match="3 nodes are connected and 4 are needed"):
        agree(grid, min_nodes=4, timeout=0.1)


def test_it_works_as_a_mod_of_an_app_that_is_made_of_a_client_fn():
    agreement = AgreementMod(identity_of, ROSTER, None)
    grid = FakeGrid(ClientApp(client_fn=lambda context: None, mods=[agreement]), NODES)

    agreed = agree(grid, min_nodes=6, timeout=4)

    assert len(agreed.members) == 6


@pytest.mark.slow
def test_on_flowers_engine_a_hidden_run_is_the_plain_one_to_the_bit(tmp_path):
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[1] / "ray_hidden.py"],
        env={**os.environ, **ENVIRONMENT, "FEDERATION_FOLDER": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=400,
    )

    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["num_agreed"] == 6
    assert found["is_same_secret"]
    assert found["num_refused"] == 0
    assert found["clusters"]["hidden"] == found["clusters"]["plain"]
    assert len(found["clusters"]["plain"]) == 2
    for revealed_weight, revealed_bias, weight, bias in found["models"].values():
        assert (revealed_weight, revealed_bias) == (weight, bias)
