"""After SIGKILL at any moment the saved state can be read, and a run ends with the same bytes."""

import random
import shutil
import time

import pytest

from fedbranch.runs import RunFolder
from fedbranch.storage.checkpoint import read_checkpoint, read_generation, write_checkpoint
from tests.reliability.small_run import (
    ROUNDS,
    digest,
    play,
    processes,
    save_again_and_again,
    tensors_of,
)


def kill_while_saving(folder, num_kills, seed):
    """Kill ``num_kills`` processes in one folder; count unreadable states and kills half-way."""
    rng = random.Random(seed)
    context = processes()
    num_unreadable = num_caught_half_way = 0
    for _ in range(num_kills):
        receive, acknowledge = context.Pipe(duplex=False)
        child = context.Process(target=save_again_and_again, args=(folder, acknowledge))
        child.start()
        acknowledge.close()
        saved = receive.recv()
        time.sleep(rng.uniform(0, 0.02))
        child.kill()
        child.join()
        try:
            while True:
                saved = receive.recv()
        except EOFError:
            pass
        num_caught_half_way += any(folder.glob("*.tmp"))
        try:
            # A kill alone never costs a generation; falling back would be a warning.
            state, files = read_checkpoint(folder, "counter")
            number = state["number"]
            assert number in (saved, saved + 1)
            assert files["changing"]["x"].tolist() == tensors_of(number).tolist()
            assert files["fixed"]["x"][0] == -1
            if saved > 1:  # the first has none before it
                before = read_generation(folder, "counter", "previous")[0]["number"]
                assert before in (number - 1, number)
        except Exception as error:
            print(repr(error))
            num_unreadable += 1
    return num_unreadable, num_caught_half_way


def test_a_checkpoint_can_be_read_whenever_its_writer_was_killed(tmp_path):
    num_unreadable, _ = kill_while_saving(tmp_path, num_kills=5, seed=1)

    assert num_unreadable == 0


@pytest.mark.reliability
def test_two_hundred_kills_leave_nothing_unreadable(tmp_path, measured):
    num_unreadable, num_half_way = kill_while_saving(tmp_path, num_kills=200, seed=2)

    write_checkpoint(tmp_path, "counter", {"number": 0}, {})
    num_left = len(list(tmp_path.iterdir()))
    measured(
        "kills-checkpoint",
        f"{num_unreadable} of 200 unreadable ({num_half_way} killed with a file half-way)",
    )
    assert num_unreadable == 0
    assert num_half_way > 0
    # Two states, and the tensors of the one that had some.
    assert num_left == 4


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_and_resume(folder, rng, context, seconds_per_round):
    """Kill a run at a random moment, then resume it; return whether it was still running."""
    stop = rng.randrange(ROUNDS)
    child = context.Process(target=play, args=(folder,))
    child.start()
    while num_lines(folder / "history.jsonl") < stop and child.is_alive():
        time.sleep(0.001)
    time.sleep(rng.uniform(0, seconds_per_round))
    was_alive = child.is_alive()
    child.kill()
    child.join()
    child = context.Process(target=play, args=(folder,), kwargs={"resume": True})
    child.start()
    child.join()
    return was_alive


def kills_of_a_run(tmp_path, num_runs, seed):
    context = processes()
    rng = random.Random(seed)
    started = time.monotonic()
    run = play(tmp_path / "whole")
    seconds_per_round = (time.monotonic() - started) / ROUNDS
    # The result is about a run with splits, joins and leaves.
    assert any(entry.record.splits for entry in run.history)
    assert any("c7" in entry.record.joined and entry.record.round > 1 for entry in run.history)
    assert any("c6" in entry.record.left for entry in run.history)
    expected = digest(tmp_path / "whole")
    num_kills = num_equal = 0
    for number in range(num_runs):
        folder = tmp_path / str(number)
        while not kill_and_resume(folder, rng, context, seconds_per_round):
            shutil.rmtree(folder)  # it had ended before the kill
        num_kills += 1
        num_equal += RunFolder(folder).is_complete and digest(folder) == expected
    return num_kills, num_equal


def test_a_killed_run_ends_with_the_same_bytes(tmp_path):
    num_kills, num_equal = kills_of_a_run(tmp_path, num_runs=1, seed=1)

    assert (num_kills > 0, num_equal) == (True, 1)


@pytest.mark.reliability
def test_twenty_killed_runs_end_with_the_same_bytes(tmp_path, measured):
    num_kills, num_equal = kills_of_a_run(tmp_path, num_runs=20, seed=2)

    measured(
        "kills-simulator",
        f"{num_equal} of 20 end with the same SHA-256 as the undisturbed run ({num_kills} kills)",
    )
    assert num_equal == 20
    assert num_kills == 20
