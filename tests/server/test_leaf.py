"""The phases of a leaf: the table in the code is the one written here, and the server keeps it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fakes import fingerprint
from fedbranch import Decision, Server, Update
from fedbranch.rules import Asks, Verdict
from fedbranch.server.leaf import (
    EVENT_OF,
    TRANSITIONS,
    Collecting,
    Event,
    Halving,
    Leaf,
    LeafMemory,
    Proposing,
    Split,
    Training,
    event_of,
    phase_after,
)
from fedbranch.server.replies.checks import Expected, check_update
from fedbranch.server.replies.held import HeldReplies
from fedbranch.server.replies.kept import Kept

IDS = ("a", "b", "c", "d")
GROUPS = (("a", "b"), ("c", "d"))
DECISIONS = [
    Event.TRAIN,
    Event.ASK_HALVES,
    Event.HOLD,
    Event.PROPOSE,
    Event.SPLIT,
]
# Written by hand: a decision about a leaf leads to the same phase, whatever the leaf was in.
AFTER = dict(zip(DECISIONS, [Training, Halving, Collecting, Proposing, Split], strict=True))
PHASES = {
    Training: Training(),
    Halving: Halving(halves=3),
    Collecting: Collecting(rounds_held=2, halves=3),
    Proposing: Proposing(
        rounds_held=2, halves=3, groups=GROUPS, since=4, losses={"a": (2.0, 1.0), "c": (2.0, 3.0)}
    ),
}
ANSWERS = {event: answer for answer, event in EVENT_OF.items()}


def replies(client_ids=IDS):
    expected = Expected(num_params=1, num_buffers=0, compares_signal=False, max_examples=10)
    return {i: check_update(Update(np.float32([1]), 1), expected) for i in client_ids}


def leaf_in(phase):
    return Leaf(phase=phase, store=Kept(HeldReplies(replies())))


def decision(event, *, groups=GROUPS, node_id=0, this_round=7):
    verdict, asks = ANSWERS[event]
    needs_groups = verdict == "split" or asks == "losses"
    return Decision(
        node_id=node_id,
        round=this_round,
        verdict=verdict,
        reason=event.name,
        asks=asks,
        groups=groups if needs_groups else (),
    )


# The table


def test_the_table_is_the_one_written_here():
    by_hand = dict.fromkeys(PHASES, AFTER)
    by_hand[Split] = {Event.KEEP: Split, Event.MERGE: Training, Event.UNDO: Training}

    assert by_hand == TRANSITIONS


@pytest.mark.parametrize("verdict", ["train", "hold", "split", "keep", "merge"])
@pytest.mark.parametrize("asks", ["nothing", "halves", "losses"])
def test_every_answer_of_a_rule_is_an_event_or_is_refused(verdict, asks):
    answer = Decision(node_id=0, round=1, verdict=verdict, reason="", asks=asks)
    allowed = {
        ("train", "nothing"): Event.TRAIN,
        ("train", "halves"): Event.ASK_HALVES,
        ("hold", "nothing"): Event.HOLD,
        ("hold", "losses"): Event.PROPOSE,
        ("split", "nothing"): Event.SPLIT,
    }

    if (verdict, asks) in allowed:
        assert event_of(answer) is allowed[verdict, asks]
    else:
        with pytest.raises(KeyError):
            event_of(answer)


def test_the_literal_types_have_no_other_answers():
    assert set(Verdict.__args__) == {"train", "hold", "split", "keep", "merge"}
    assert set(Asks.__args__) == {"nothing", "halves", "losses"}


# One step


@pytest.mark.parametrize("phase", list(PHASES.values()), ids=lambda phase: type(phase).__name__)
def test_training_forgets_everything_of_the_phase(phase):
    assert phase_after(leaf_in(phase), decision(Event.TRAIN), 7) == Training()


@pytest.mark.parametrize("phase", list(PHASES.values()), ids=lambda phase: type(phase).__name__)
def test_halves_are_named_by_the_round_that_asked_for_them(phase):
    assert phase_after(leaf_in(phase), decision(Event.ASK_HALVES), 7) == Halving(halves=7)


@pytest.mark.parametrize("phase", list(PHASES.values()), ids=lambda phase: type(phase).__name__)
def test_holding_counts_its_rounds_and_keeps_the_halves(phase):
    after = phase_after(leaf_in(phase), decision(Event.HOLD), 7)

    assert after == Collecting(rounds_held=phase.rounds_held + 1, halves=phase.halves)


@pytest.mark.parametrize("phase", list(PHASES.values()), ids=lambda phase: type(phase).__name__)
def test_a_new_proposal_has_no_losses_yet(phase):
    groups = (("a",), ("b", "c", "d"))

    after = phase_after(leaf_in(phase), decision(Event.PROPOSE, groups=groups), 7)

    assert after == Proposing(
        rounds_held=phase.rounds_held + 1, halves=phase.halves, groups=groups, since=7
    )


def test_the_same_proposal_goes_on_waiting_with_the_losses_it_has():
    phase = PHASES[Proposing]

    after = phase_after(leaf_in(phase), decision(Event.PROPOSE), 7)

    assert after == replace(phase, rounds_held=3)


def test_a_proposal_that_clients_have_left_goes_on_waiting_for_the_others():
    leaf = leaf_in(PHASES[Proposing]).without(["a"])
    left = (("b",), ("c", "d"))

    after = phase_after(leaf, decision(Event.PROPOSE, groups=left), 7)

    assert leaf.proposal == left
    assert (after.since, after.losses) == (4, {"c": (2.0, 3.0)})


def test_a_proposal_that_a_whole_group_has_left_is_none():
    leaf = leaf_in(PHASES[Proposing]).without(["a", "b"])

    assert leaf.proposal == ()
    assert leaf.lacking(IDS) == ["a", "b"]  # they would have to answer again


@pytest.mark.parametrize("phase", list(PHASES.values()), ids=lambda phase: type(phase).__name__)
def test_a_split_is_no_phase_of_a_leaf(phase):
    with pytest.raises(AssertionError, match="leads to Split"):
        phase_after(leaf_in(phase), decision(Event.SPLIT), 7)


def test_losses_are_taken_only_while_a_proposal_waits():
    for kind, phase in PHASES.items():
        leaf = leaf_in(phase)

        with_losses = leaf.with_losses({"b": (1.0, 1.0)})

        if kind is Proposing:
            assert with_losses.losses == {**phase.losses, "b": (1.0, 1.0)}
        else:
            assert with_losses is leaf


def test_a_leaf_waits_for_clients_without_a_reply_and_for_those_without_losses():
    proposing, collecting = leaf_in(PHASES[Proposing]), leaf_in(PHASES[Collecting])

    assert proposing.lacking([*IDS, "new"]) == ["b", "d", "new"]
    assert collecting.lacking([*IDS, "new"]) == ["new"]


# What a leaf remembers


def test_only_an_examination_with_halves_counts_as_one():
    plain = LeafMemory().after_training(Training(), decision(Event.TRAIN), 5, None)
    halved = LeafMemory().after_training(
        Collecting(rounds_held=2, halves=3), decision(Event.TRAIN), 5, None
    )

    assert plain == LeafMemory()
    assert (halved.num_examined, halved.examined_at, halved.rounds_held_for_it) == (1, 5, 2)
    assert halved.hold_ended == 5


# A server with a scripted rule


class Scripted:
    """A rule that decides the event it is given, one a round."""

    review_after = tuple(range(1, 100))

    def __init__(self):
        self.event = Event.TRAIN
        self.halves_were_asked_for = None

    def examine(self, evidence):
        self.halves_were_asked_for = evidence.asked_for_halves
        ids = evidence.client_ids
        groups = (ids[:2], ids[2:])
        return decision(
            self.event, groups=groups, node_id=evidence.node_id, this_round=evidence.round
        )

    def review(self, review):
        return Decision(
            node_id=review.node_id,
            round=review.round,
            verdict="merge" if self.event is Event.MERGE else "keep",
            reason="",
        )


def play(server, rule, event):
    rule.event = event
    tasks = server.plan(IDS)
    sent = {"a": 1, "b": 1, "c": -1, "d": -1.5}
    updates = {i: Update(np.float32([sent[i]]), 1) for i in tasks}
    losses = {i: [1.0] * len(trials) for i, trials in server.trials(IDS).items()}
    return server.step(updates, losses=losses)


def phase_of(server):
    if not server.tree.root.is_leaf:
        return Split
    return type(server.state.leaves.get(0, Leaf()).phase)


@pytest.mark.parametrize("walk", list(itertools.product(DECISIONS[:4], repeat=3)))
def test_a_scripted_rule_walks_the_server_through_the_phases_of_the_table(walk):
    rule = Scripted()
    server = Server(1, rule=rule)
    phase, held, version = Training, 0, 0
    for event in (*walk, Event.SPLIT):
        record = play(server, rule, event)
        was, phase = phase, TRANSITIONS[phase][event]
        trains = phase in (Training, Halving)
        held = 0 if trains else held + 1
        version += trains
        assert [one.reason for one in record.decisions] == [event.name]
        assert phase_of(server) is phase
        assert server.tree.root.version == version  # the parameters move only where it trains
        assert rule.halves_were_asked_for or was is not Halving
        if phase is not Split:
            assert server.state.leaves[0].phase.rounds_held == held
    assert list(server.clusters.values()) == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("event", [Event.KEEP, Event.MERGE, Event.UNDO])
def test_what_becomes_of_a_split_is_what_the_table_says(event):
    rule = Scripted()
    server = Server(1, rule=rule)
    play(server, rule, Event.SPLIT)
    rule.event = Event.TRAIN

    if event is Event.UNDO:
        server.undo_split(0)
    else:
        tasks, trials = server.plan(IDS), server.trials(IDS)
        rule.examine = lambda seen: decision(Event.TRAIN, node_id=seen.node_id, this_round=2)
        rule.event = event
        server.step(
            {i: Update(np.float32([1]), 1) for i in tasks},
            losses={i: [1.0] * len(own) for i, own in trials.items()},
        )

    assert phase_of(server) is TRANSITIONS[Split][event]


@pytest.mark.parametrize("path", [(), (Event.ASK_HALVES,), (Event.HOLD,), (Event.PROPOSE,)])
@pytest.mark.parametrize(
    "answer",
    [pair for pair in itertools.product(Verdict.__args__, Asks.__args__) if pair not in EVENT_OF],
)
def test_an_answer_outside_the_table_is_refused_in_every_phase(path, answer):
    rule = Scripted()
    server = Server(1, rule=rule)
    for event in path:
        play(server, rule, event)
    verdict, asks = answer
    groups = GROUPS if verdict == "split" or asks == "losses" else ()
    rule.examine = lambda seen: Decision(
        node_id=seen.node_id, round=seen.round, verdict=verdict, reason="", asks=asks, groups=groups
    )
    updates = {i: Update(np.float32([1]), 1) for i in server.plan(IDS)}
    before = fingerprint(server)

    with pytest.raises(ValueError, match="decided on"):
        server.step(updates)

    assert fingerprint(server) == before
