"""The check of drivers: ours pass, and broken ones are caught."""

from dataclasses import fields, replace

import pytest

from fedbranch import Server, ServerOptions
from fedbranch.testing import check_driver, drivers, plain_loop
from testing import our_drivers


@pytest.mark.parametrize(
    "run", [plain_loop, our_drivers.simulator, our_drivers.flower], ids=lambda run: run.__name__
)
def test_our_drivers_keep_their_contract(run):
    check_driver(run)


def test_any_engine_of_the_simulator_keeps_it_except_for_rounding():
    check_driver(our_drivers.stacked_simulator, same_bytes=False)


def loop(
    *,
    options_of=lambda options: options,
    present_in=lambda clients, number: clients.present(number),
    update_of=lambda update, number: update,
    has_trials=True,
    losses_of=lambda losses: losses,
    records_of=lambda history: history,
):
    """Make a plain loop that does one thing wrong."""

    def run(clients, rounds, options):
        sizes = {"num_buffers": clients.num_buffers}
        server = Server(clients.num_params, options=options_of(options), **sizes)
        history = []
        for number in range(1, rounds + 1):
            present = present_in(clients, number)
            tasks = server.plan(present)
            trials = server.trials(present) if has_trials else {}
            updates = {
                i: update_of(clients.update(i, task, number), number) for i, task in tasks.items()
            }
            losses = {i: losses_of(clients.losses(i, own)) for i, own in trials.items()}
            updates = {i: update for i, update in updates.items() if update is not None}
            history.append(server.step(updates, losses))
        return records_of(history), server.tree

    return run


def test_a_loop_that_removes_no_client_keeps_the_contract():
    check_driver(loop())


def test_what_clients_cannot_do_can_be_left_out():
    no_halves = loop(update_of=lambda update, number: replace(update, half_difference=None))

    check_driver(no_halves, without=["halves"])
    check_driver(loop(has_trials=False), without=["trials"])
    with pytest.raises(ValueError, match=r"without names \['routes'\]"):
        check_driver(plain_loop, without=["routes"])


def fails(clients, rounds, options):
    raise ConnectionError("no client answers")


def finite(update, number):
    return None if not abs(update.vector).max() < 1e9 else update


def rounded(update, number):
    return replace(update, vector=update.vector.astype("float16").astype("float32"))


@pytest.mark.parametrize(
    ("run", "clause"),
    [
        (fails, r"run\(clients, rounds, options\) returns.*no client answers"),
        (loop(records_of=lambda history: history[1:]), "the record of every round"),
        (loop(present_in=lambda clients, _: clients.ids), "rounds are those of a plain loop"),
        (
            loop(present_in=lambda clients, number: clients.present(min(number, 2))),
            "rounds are those of a plain loop.*round 11: ",
        ),
        (loop(update_of=rounded), "rounds are those of a plain loop"),
        (loop(update_of=finite), "replies that the server will refuse are handed to it"),
        (
            loop(update_of=lambda update, n: replace(update, half_difference=None)),
            r"a task with halves is answered with half updates.*half updates of \[\]",
        ),
        (loop(has_trials=False), "a trial is answered with a loss"),
        (
            loop(losses_of=lambda losses: losses[::-1]),
            "half updates and losses are those that the clients computed",
        ),
    ],
)
def test_a_broken_driver_is_caught(run, clause):
    with pytest.raises(AssertionError, match=f"(?s)clause: .*{clause}"):
        check_driver(run)


def test_a_client_that_is_asked_after_it_has_left_is_caught():
    def present_in(clients, number):
        return clients.present(min(number, 2)) if len(clients.ids) == 4 else clients.present(number)

    with pytest.raises(AssertionError, match=r"round 3: .*'partition-0001' left in round 3"):
        check_driver(loop(present_in=present_in))


DEFAULTS = {item.name: getattr(ServerOptions(), item.name) for item in fields(ServerOptions)} | {
    "keep_updates": True
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_option_that_does_not_reach_the_server_is_caught(name):
    def options_of(options):
        own = {name: DEFAULTS[name]}
        if name == "sketch":  # a server without sketches keeps updates
            own["keep_updates"] = True
        return replace(options, **own)

    is_rule = name == "rule"  # the first clause that breaks is then about the rounds
    clause = "rounds are those of a plain loop" if is_rule else f"options reach.*{name}="
    with pytest.raises(AssertionError, match=f"(?s){clause}"):
        check_driver(loop(options_of=options_of))


@pytest.mark.parametrize(
    "own", [{"guard": None}, {"weighting": "equal"}], ids=["guard", "weighting"]
)
def test_defaults_reach_the_server_too(own):
    with pytest.raises(AssertionError, match="rounds are those of a plain loop"):
        check_driver(loop(options_of=lambda options: replace(options, **own)))


def test_a_driver_that_promises_only_rounding_may_round():
    def update_of(update, number):
        return replace(update, vector=update.vector * 1.000001)

    check_driver(loop(update_of=update_of), same_bytes=False)
    with pytest.raises(AssertionError, match="rounds are those of a plain loop"):
        check_driver(loop(update_of=update_of))


def test_the_check_splits_and_routes():
    clients = drivers.TinyClients(7, has_buffers=True, joins={"partition-0006": 11})

    history, tree = plain_loop(clients, 14, ServerOptions(rule=drivers.SPLITS))

    assert sum(len(record.splits) for record in history) == 1
    assert [move.client_id for record in history for move in record.routed] == ["partition-0006"]
    assert sorted(map(len, (tree.members(leaf.id) for leaf in tree.leaves))) == [3, 4]
