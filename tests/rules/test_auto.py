"""AutoRule through the server, with clients that are a quadratic bowl each."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fedbranch import AutoRule, Decision, Evidence, Review, Server, Task, Update, weighted_mean
from fedbranch.core.geometry import cosine_similarity
from fedbranch.rules import PastRound, rule_from_state, rule_to_state
from fedbranch.server.state import OnTrial
from fedbranch.training.seeds import stream_seed

DIM = 40


class Bowls:
    """Clients whose rows are optima scattered about the centre of their group.

    Training goes half of the way to the mean of the rows; the loss is the mean squared
    distance to them.
    """

    def __init__(self, groups, *, num_rows=40, spread=3.0, apart=1.0, seed=0):
        rng = np.random.default_rng(seed)
        names = sorted(set(groups))
        centres = dict(zip(names, apart * rng.normal(size=(len(names), DIM)), strict=True))
        self.group_of = {f"c{i:02}": group for i, group in enumerate(groups)}
        self.rows = {
            i: centres[g] + spread * rng.normal(size=(num_rows, DIM))
            for i, g in self.group_of.items()
        }
        self.held_out = {
            i: centres[g] + spread * rng.normal(size=(num_rows, DIM))
            for i, g in self.group_of.items()
        }
        self.can_halve, self.can_measure = True, True
        self.cannot_halve = set()
        self.sends_signal = False

    def half(self, client_id, number, which):
        order = np.random.default_rng(stream_seed(number, client_id)).permutation(
            len(self.rows[client_id])
        )
        return self.rows[client_id][
            order[: len(order) // 2] if which == 0 else order[len(order) // 2 :]
        ]

    def update(self, client_id, task: Task):
        def step(rows):
            return (0.5 * (rows.mean(axis=0) - task.params)).astype(np.float32)

        is_whole = task.halves is None or not self.can_halve or client_id in self.cannot_halve
        parts = [self.rows[client_id]]
        if not is_whole:
            parts = [self.half(client_id, task.halves, which) for which in (0, 1)]
        a, b = (step(part) for part in (parts[0], parts[-1]))
        scale = np.float32(100 if self.sends_signal else 1)
        return Update(
            (a + b) / 2,
            num_examples=1,
            metrics={"loss": 1.0},
            signal=scale * (a + b) / 2 if self.sends_signal else None,
            half_difference=None if is_whole else scale * (a - b) / 2,
        )

    def losses(self, client_id, trials):
        found = []
        for trial in trials:
            rows = self.held_out[client_id]
            if trial.on != "held-out":
                rows = self.half(client_id, trial.halves, 0 if trial.on == "first half" else 1)
            found.append(float(((rows - trial.params) ** 2).sum(axis=1).mean()))
        return found

    def run(self, rounds, rule=None, server=None, asked=lambda ids, _: ids):
        server = Server(DIM, rule=rule) if server is None else server
        records = []
        server.join([i for i in self.rows if i not in server.tree])
        for _ in range(rounds):
            ids = asked(sorted(self.rows), server)
            tasks = server.plan(ids)
            trials = server.trials(ids) if self.can_measure else {}
            records.append(
                server.step(
                    {i: self.update(i, task) for i, task in tasks.items()},
                    losses={i: self.losses(i, own) for i, own in trials.items()},
                )
            )
        return server, records

    def found(self, server):
        leaves = {i: server.tree.position(i) for i in self.group_of}
        pairs = set(zip(leaves.values(), self.group_of.values(), strict=True))
        return len(pairs) == len(set(leaves.values())) == len(set(self.group_of.values()))


def verdicts(records):
    return [decision.verdict for record in records for decision in record.decisions]


@pytest.mark.parametrize("groups", ["ab" * 6, "abcd" * 4, "a" * 18 + "bb", "a" * 19 + "b"])
def test_all_groups_are_split_at_once_and_early(groups):
    bowls = Bowls(groups)

    server, records = bowls.run(8)

    assert bowls.found(server)
    assert sum(len(record.splits) for record in records) == 1
    assert records[2].splits  # trained, examined, measured


@pytest.mark.parametrize("seed", range(5))
def test_clients_of_one_group_stay_together(seed):
    bowls = Bowls("a" * 20, spread=5.0, seed=seed)

    server, records = bowls.run(40)

    assert len(server.clusters) == 1
    assert "split" not in verdicts(records)


def test_clients_that_are_all_different_stay_together():
    bowls = Bowls([str(i) for i in range(20)], spread=0.5)

    server, _ = bowls.run(20)

    assert len(server.clusters) == 1


def test_an_examination_costs_one_exchange_and_one_double_upload():
    bowls = Bowls("ab" * 6)
    server = Server(DIM)
    server.join(sorted(bowls.rows))
    asked = []
    for _ in range(4):
        tasks = server.plan(sorted(bowls.rows))
        trials = server.trials(sorted(bowls.rows))
        asked.append((len(tasks), {t.halves is not None for t in tasks.values()}, len(trials)))
        server.step(
            {i: bowls.update(i, task) for i, task in tasks.items()},
            losses={i: bowls.losses(i, own) for i, own in trials.items()},
        )

    assert asked == [(12, {False}, 0), (12, {True}, 0), (0, set(), 12), (12, {False}, 0)]


def test_examinations_without_a_result_become_rare():
    _, records = Bowls("a" * 20, spread=20.0).run(100)

    examined = [r.round for r in records for d in r.decisions if "p_structure" in d.measurements]
    gaps = np.diff(examined)
    assert examined[0] == 2
    assert len(examined) <= 14
    assert gaps[-1] >= 10


def test_the_mean_of_the_half_updates_trains():
    bowls = Bowls("a" * 10)
    server, _ = bowls.run(2)
    plain, _ = Bowls("a" * 10).run(2, rule=AutoRule(coverage=1.0))

    assert server.tree.root.version == 2
    assert np.array_equal(server.tree.root.params, plain.tree.root.params)


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_with_few_clients_in_a_round_the_cluster_stands_still_for_the_others(share):
    bowls = Bowls("ab" * 8)
    rng = np.random.default_rng(0)

    def some(ids, server):
        awaited = [i for i in server.awaited() if i in ids]
        others = [i for i in ids if i not in awaited]
        rng.shuffle(others)
        return sorted([*awaited, *others][: round(share * len(ids))])

    server, records = bowls.run(60, asked=some)

    assert bowls.found(server)
    assert "hold" in verdicts(records)


def test_what_the_paper_draws_is_measured_at_every_examination():
    server, records = Bowls("ab" * 6).run(3)

    (examined,) = (d for record in records for d in record.decisions if d.asks == "losses")
    split = {i: child for child in (1, 2) for i in server.tree[child].cached_updates}
    updates = {**server.tree[1].cached_updates, **server.tree[2].cached_updates}
    similarity = cosine_similarity(np.stack([updates[i] for i in sorted(updates)]))
    groups = [split[i] for i in sorted(updates)]
    across = np.not_equal.outer(groups, groups)
    assert examined.measurements["cross_similarity"] == pytest.approx(similarity[across].max())
    assert examined.measurements["separation_gap"] == pytest.approx(
        similarity[~across].min() - similarity[across].max()
    )


def test_whoever_did_not_answer_is_routed_to_its_group_later():
    bowls = Bowls("ab" * 10)
    server, _ = bowls.run(4, asked=lambda ids, _: ids[:-2])
    assert len(server.clusters) == 2
    assert not bowls.found(server)

    bowls.run(1, server=server)

    assert bowls.found(server)


def test_a_split_that_does_not_pay_is_not_made():
    """Groups that are real, but whose clients are measured on data of neither."""
    bowls = Bowls("ab" * 8, spread=0.3)
    bowls.losses = lambda client_id, trials: [1.0, 1.0 + 0.01 * (hash(client_id) % 7)] * 2

    server, records = bowls.run(6)

    assert len(server.clusters) == 1
    reasons = [d.reason for r in records for d in r.decisions]
    assert any("does not pay" in reason for reason in reasons)


def test_a_split_is_merged_back_if_it_did_not_pay():
    bowls = Bowls("ab" * 8)
    server, _ = bowls.run(3)
    leaves = server.tree.leaves
    assert len(leaves) == 2
    bowls.losses = lambda _, trials: [1.0, *[2.0] * (len(trials) - 1)]

    _, records = bowls.run(5, server=server)

    merges = [d for r in records for d in r.decisions if d.verdict == "merge"]
    assert [d.node_id for d in merges] == [0]
    assert server.tree.root.is_leaf
    assert server.tree.members(0) == sorted(bowls.rows)
    _, records = bowls.run(4, server=server)
    assert "split" not in verdicts(records)  # not at once again


def test_merging_goes_to_the_mean_of_the_leaves():
    bowls = Bowls("ab" * 8)
    server, _ = bowls.run(6)
    expected = np.mean([leaf.params for leaf in server.tree.leaves], axis=0)

    server.merge_split(0)

    assert server.tree.root.params == pytest.approx(expected, abs=1e-5)


def test_a_good_split_is_kept():
    _, records = Bowls("ab" * 8).run(30)

    assert verdicts(records).count("keep") == 3
    assert "merge" not in verdicts(records)


def test_a_client_in_the_wrong_group_is_moved():
    bowls = Bowls("abc" * 5)
    server, _ = bowls.run(3)
    wrong = next(i for i in server.clusters if "c00" not in server.clusters[i])
    server.tree.place("c00", wrong)
    assert not bowls.found(server)

    _, records = bowls.run(5, server=server)

    assert bowls.found(server)
    assert [set(d.moves) for r in records for d in r.decisions if d.moves] == [{"c00"}]


def test_nobody_is_moved_where_all_models_are_alike():
    losses = {f"c{i}": (1.0, 0.9 + 0.01 * i, 0.95 - 0.01 * i) for i in range(8)}
    clusters = {1: [f"c{i}" for i in range(4)], 2: [f"c{i}" for i in range(4, 8)]}
    review = Review(node_id=0, round=9, rounds_since_split=5, clusters=clusters, losses=losses)

    assert AutoRule().review(review).moves == {}


class Mover(AutoRule):
    def review(self, review):
        moves = {next(iter(review.losses)): 99}
        return replace(super().review(review), moves=moves)


def test_a_rule_cannot_move_clients_out_of_the_split():
    with pytest.raises(ValueError, match="99"):
        Bowls("ab" * 8).run(10, rule=Mover())


def test_without_half_updates_the_gap_and_held_out_losses_decide():
    bowls = Bowls("ab" * 8, apart=3.0, spread=1.0)
    bowls.can_halve = False
    server, records = bowls.run(8)
    assert bowls.found(server)
    assert any(
        "0 of 16 clients sent half updates" in d.reason for r in records for d in r.decisions
    )

    same = Bowls("a" * 16)
    same.can_halve = False
    server, _ = same.run(30)
    assert len(server.clusters) == 1


@pytest.mark.parametrize("seed", range(8))
def test_without_half_updates_few_alike_clients_are_not_split_by_chance(seed):
    bowls = Bowls("a" * 6, num_rows=10, seed=seed)
    bowls.can_halve = False

    server, _ = bowls.run(30)

    assert len(server.clusters) == 1


def test_without_losses_it_splits_on_what_the_halves_show():
    bowls = Bowls("ab" * 8)
    bowls.can_measure = False

    server, records = bowls.run(8)

    assert bowls.found(server)
    (split,) = [d for r in records for d in r.splits]
    assert "no client could measure" in split.reason


def test_with_neither_only_a_wide_gap_counts():
    wide, narrow = (Bowls("ab" * 8, apart=3.0, spread=spread) for spread in (1.0, 20.0))
    for bowls in (wide, narrow):
        bowls.can_halve = bowls.can_measure = False

    assert wide.found(wide.run(4)[0])
    server, records = narrow.run(4)
    assert len(server.clusters) == 1
    assert "neither half updates nor losses" in records[-1].decisions[0].reason


def test_two_clients_are_never_split():
    server, records = Bowls("ab").run(10)

    assert len(server.clusters) == 1
    assert all("fewer than three" in d.reason for r in records for d in r.decisions)


def test_only_conflicts_waits_until_one_model_has_converged():
    early, _ = Bowls("ab" * 8).run(20, rule=AutoRule(only_conflicts=True))
    assert len(early.clusters) == 1

    bowls = Bowls("ab" * 8)
    late, records = bowls.run(80, rule=AutoRule(only_conflicts=True))
    assert bowls.found(late)
    assert any("perhaps no conflict" in d.reason for r in records for d in r.decisions)


def test_only_conflicts_does_not_split_what_converges_to_one_model():
    """Groups whose updates differ, but shrink: they have the same optimum in the end."""
    rule = AutoRule(only_conflicts=True)
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=DIM) for _ in range(2))
    noise = 0.05 * rng.normal(size=(12, DIM))
    updates = np.float32(np.stack([a - b] * 6 + [b - a] * 6) + noise)
    halves = np.float32(0.05 * rng.normal(size=(12, DIM)))
    evidence = Evidence(
        node_id=0,
        round=60,
        client_ids=tuple(f"c{i:02}" for i in range(12)),
        updates=updates,
        weights=np.ones(12),
        mean_update=weighted_mean(updates, np.ones(12)),
        num_members=12,
        rounds_trained=60,
        rounds_held=0,
        rounds_since_hold=None,
        asked_for_halves=True,
        halved_rows=tuple(range(12)),
        half_differences=halves,
    )
    length = float(np.linalg.norm(updates, axis=1).mean())

    def decided(norms, losses):
        past = [PastRound(n, loss) for n, loss in zip(norms, losses, strict=True)]
        return rule.examine(replace(evidence, past=past)).verdict

    flat, falling = [length] * 60, [length * 0.97**i for i in range(60, 0, -1)][::-1]
    assert decided(flat, [1.0] * 60) == "hold"
    assert decided(falling, [1.0] * 60) == "train"
    assert decided(flat, [0.97**i for i in range(60)]) == "train"
    assert decided(flat, [None] * 60) == "hold"
    assert decided(flat[:20], [1.0] * 20) == "train"


def test_losses_that_are_not_finite_count_as_bad_as_can_be():
    def decision(own):
        return AutoRule().review(
            Review(
                node_id=0,
                round=9,
                rounds_since_split=5,
                clusters={1: [f"c{i}" for i in range(8)], 2: ["d"]},
                losses={f"c{i}": (1.0, own, 3.0) for i in range(8)},
            )
        )

    assert decision(1e9).verdict == decision(math.nan).verdict == "merge"
    assert decision(math.inf).verdict == "merge"
    assert decision(0.5).verdict == "keep"


def test_losses_are_refused_by_themselves():
    bowls = Bowls("ab" * 6)
    server, _ = bowls.run(2)
    ids = sorted(bowls.rows)
    server.plan(ids)
    trials = server.trials(ids)
    losses = {i: bowls.losses(i, own) for i, own in trials.items()}
    losses |= {"c00": [1.0], "c01": "losses", "c02": [None, 1.0, 2.0, 3.0], "stranger": [1.0]}

    record = server.step({}, losses=losses)

    assert set(record.refused) == {"c00", "c01", "c02", "stranger"}
    assert "send 4 numbers" in record.refused["c00"]
    assert "was not asked for any" in record.refused["stranger"]


def test_a_client_that_leaves_during_an_examination_is_not_waited_for():
    bowls = Bowls("ab" * 6)
    server, _ = bowls.run(2)
    server.remove(["c00", "c01"])
    del bowls.rows["c00"], bowls.rows["c01"]

    bowls.run(1, server=server)

    assert len(server.clusters) == 2
    assert sum(map(len, server.clusters.values())) == 10


def test_if_one_of_three_proposed_groups_leaves_the_others_are_split():
    bowls = Bowls("abc" * 5)
    server, _ = bowls.run(2)
    gone = [i for i, group in bowls.group_of.items() if group == "c"]
    server.remove(gone)
    for client_id in gone:
        del bowls.rows[client_id], bowls.group_of[client_id]

    _, records = bowls.run(4, server=server)

    assert bowls.found(server)
    assert verdicts(records).count("hold") <= 2


def test_a_cluster_does_not_stand_still_for_ever_while_clients_come_and_go():
    bowls = Bowls("ab" * 10)
    server = Server(DIM)
    leaving = iter(sorted(bowls.rows)[:12])

    def some(ids, server):
        client_id = next(leaving, None)
        if client_id is not None and client_id in server.tree:
            server.remove([client_id])
            del bowls.rows[client_id]
        return [i for i in ids if i in bowls.rows]

    bowls.run(30, server=server, asked=some)

    assert server.tree.root.version > 1 or not server.tree.root.is_leaf


def test_too_few_are_left_of_a_proposal_that_nobody_measures():
    updates = np.float32([[1, 0], [-1, 0]])
    evidence = Evidence(
        node_id=0,
        round=9,
        client_ids=("a", "b"),
        updates=updates,
        weights=np.ones(2),
        mean_update=np.zeros(2, np.float32),
        num_members=5,
        rounds_trained=3,
        rounds_held=2,
        rounds_since_hold=None,
        asked_for_halves=True,
        proposal=(("a",), ("b",)),
        rounds_proposed=2,
    )

    assert AutoRule().examine(evidence).verdict == "train"


def test_signals_are_compared_and_updates_tried():
    bowls = Bowls("ab" * 8)
    bowls.sends_signal = True

    server, _ = bowls.run(4, server=Server(DIM, compare="signal"))

    assert bowls.found(server)


def test_who_cannot_make_halves_is_routed_to_its_group():
    bowls = Bowls("abcd" * 5)
    bowls.cannot_halve = {"c03", "c08"}

    server, _ = bowls.run(5)

    assert bowls.found(server)


def test_splits_that_never_pay_become_rare():
    bowls = Bowls("ab" * 8)
    honest = bowls.losses
    bowls.losses = lambda i, trials: (
        honest(i, trials) if trials[0].halves else [1.0, *[2.0] * (len(trials) - 1)]
    )

    _, records = bowls.run(300)

    merges = [r.round for r in records for d in r.decisions if d.verdict == "merge"]
    gaps = np.diff(merges)
    assert len(merges) <= 6
    assert (np.diff(gaps) > 0).all()


def test_losses_may_be_asked_for_in_parts_and_survive_a_checkpoint(tmp_path):
    bowls = Bowls("ab" * 8)
    server, _ = bowls.run(2)
    ids = sorted(bowls.rows)
    server.plan(ids)
    trials = server.trials(ids[:5]) | server.trials(ids[5:])
    server.save(tmp_path)

    loaded = Server.load(tmp_path)
    record = loaded.step({}, losses={i: bowls.losses(i, own) for i, own in trials.items()})

    assert record.refused == {}
    assert record.splits


def test_bad_losses_do_not_take_the_update_with_them():
    bowls = Bowls("ab" * 8)
    server, _ = bowls.run(4)
    ids = sorted(bowls.rows)
    tasks, trials = server.plan(ids), server.trials(ids)
    losses = {i: np.array(bowls.losses(i, own)) for i, own in trials.items()}
    assert "c00" in losses
    losses["c00"] = [1.0]

    record = server.step({i: bowls.update(i, t) for i, t in tasks.items()}, losses=losses)

    assert set(record.refused) == {"c00"}
    assert set(record.metrics) == set(ids)


def test_half_differences_of_some_survive_a_checkpoint(tmp_path):
    bowls = Bowls("ab" * 8)
    bowls.cannot_halve = {"c01"}
    server, _ = bowls.run(2)
    server.save(tmp_path)

    loaded = Server.load(tmp_path)

    before, after = server.to_state(), loaded.to_state()
    assert before[0] == after[0]
    assert before[1].keys() == after[1].keys()
    for name, tensors in before[1].items():
        for key, tensor in tensors.items():
            assert np.array_equal(tensor, after[1][name][key])
    assert loaded.trials(["c00"])["c00"][0].on == "second half"


class Undecided:
    """Splits off one client at a time, and wants everything back."""

    review_after = (3, 4)

    def examine(self, evidence):
        ids = evidence.client_ids
        if evidence.round in (2, 3) and len(ids) > 1:
            groups = (ids[:1], ids[1:])
            return Decision(
                node_id=evidence.node_id,
                round=evidence.round,
                verdict="split",
                reason="",
                groups=groups,
            )
        return Decision(node_id=evidence.node_id, round=evidence.round, verdict="train", reason="")

    def review(self, review):
        return Decision(node_id=review.node_id, round=review.round, verdict="merge", reason="")


def test_splits_within_splits_are_not_reviewed_at_once():
    bowls = Bowls("a" * 6)

    server, records = bowls.run(12, rule=Undecided())

    assert [d.node_id for r in records for d in r.decisions if d.verdict == "merge"] == [0]
    assert server.tree.root.is_leaf


@pytest.mark.parametrize("num_rounds", [4, 5])
def test_an_undone_split_takes_what_was_asked_there_with_it(num_rounds):
    bowls = Bowls("abc" * 5)
    server, _ = bowls.run(num_rounds)
    ids = sorted(bowls.rows)
    server.plan(ids)
    server.trials(ids)
    server.state.on_trial["c00"] = OnTrial(
        server.tree.position("c00"), 4, ()
    )  # as a proposal there would
    server.undo_split(0)

    record = server.step({}, losses={i: [1.0] * 4 for i in ids})

    assert set(record.refused) == set(ids)


def test_losses_for_clusters_that_are_gone_are_refused():
    bowls = Bowls("abc" * 5)
    server, _ = bowls.run(4)
    ids = sorted(bowls.rows)
    server.plan(ids)
    trials = server.trials(ids)
    assert trials
    server.merge_split(0)

    record = server.step({}, losses={i: bowls.losses(i, own) for i, own in trials.items()})

    assert len(record.refused) == len(ids)


def test_if_a_whole_proposed_group_leaves_the_rest_trains_on():
    bowls = Bowls("a" * 18 + "bb")
    server, _ = bowls.run(2)
    server.remove(["c18", "c19"])
    del bowls.rows["c18"], bowls.rows["c19"]

    bowls.run(4, server=server)

    assert len(server.clusters) == 1
    assert server.tree.root.version > 2


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 7])
def test_a_server_saved_in_the_middle_of_an_examination_goes_on_to_the_same_bits(
    tmp_path, num_rounds
):
    whole, _ = Bowls("abc" * 5).run(12)
    begun, _ = Bowls("abc" * 5).run(num_rounds)
    begun.save(tmp_path)

    resumed, _ = Bowls("abc" * 5).run(12 - num_rounds, server=Server.load(tmp_path))

    assert resumed.clusters == whole.clusters
    for one, other in zip(resumed.tree, whole.tree, strict=True):
        assert np.array_equal(one.params, other.params)
    assert resumed.to_state()[0] == whole.to_state()[0]


def test_the_rule_survives_a_checkpoint():
    rule = AutoRule(only_conflicts=True, coverage=0.5, review_after=(3,))

    assert rule_from_state(rule_to_state(rule)) == rule


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"error_level": 0}, "error_level is 0.0; it must be a number in (0, 0.5)"),
        ({"coverage": 1.5}, "coverage is 1.5"),
        ({"max_hold_rounds": 0}, "max_hold_rounds is 0"),
        ({"review_after": (5, 5)}, "review_after is (5, 5); it must be positive and ascending"),
        ({"review_after": (0,)}, "review_after is (0,)"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        AutoRule(**settings)


def test_only_conflicts_is_true_or_false():
    with pytest.raises(TypeError, match="only_conflicts is 'no'"):
        AutoRule(only_conflicts="no")


class Asking:
    def __init__(self, **decision):
        self.decision = decision

    def examine(self, evidence):
        return Decision(node_id=evidence.node_id, round=evidence.round, **self.decision)


@pytest.mark.parametrize(
    "decision",
    [
        {"verdict": "keep", "reason": ""},
        {"verdict": "train", "reason": "", "asks": "losses", "groups": (("c00",), ("c01",))},
        {"verdict": "hold", "reason": "", "asks": "losses"},
        {"verdict": "hold", "reason": "", "asks": "halves"},
        {"verdict": "train", "reason": "", "asks": "money"},
    ],
)
def test_a_rule_cannot_ask_for_what_makes_no_sense(decision):
    with pytest.raises(ValueError, match="decided on"):
        Bowls("ab" * 3).run(1, rule=Asking(**decision))


def test_of_very_many_clients_some_are_compared_and_the_others_find_their_group(monkeypatch):
    monkeypatch.setattr("fedbranch.rules.group_search.MOST_COMPARED", 12)
    bowls = Bowls([0, 1, 2] * 12)

    server, records = bowls.run(8)

    decisions = [decision for record in records for decision in record.decisions]
    split = next(decision for decision in decisions if decision.verdict == "split")
    assert {d.measurements.get("num_halved") for d in decisions} == {12, None}
    assert sum(map(len, split.groups)) == 12
    found = {frozenset(bowls.group_of[i] for i in ids) for ids in server.clusters.values()}
    assert sorted(map(sorted, found)) == [[0], [1], [2]]
    assert sum(map(len, server.clusters.values())) == 36


def test_groups_that_alternate_are_seen_when_some_clients_are_compared(monkeypatch):
    # Every second client would be of one group only.
    monkeypatch.setattr("fedbranch.rules.group_search.MOST_COMPARED", 20)
    bowls = Bowls([*[0, 1] * 19, 0])

    server, _ = bowls.run(8)

    found = {frozenset(bowls.group_of[i] for i in ids) for ids in server.clusters.values()}
    assert sorted(map(sorted, found)) == [[0], [1]]
