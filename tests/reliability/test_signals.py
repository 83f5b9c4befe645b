"""Ctrl-C and SIGTERM: a run ends at once, leaves nothing behind, and can go on."""

import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.reliability.interruptions import (
    COMMAND,
    CONFIG,
    folder_digest,
    start,
    stop,
    wait_for_rounds,
    wait_until,
    wait_until_it_can_be_stopped,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc")

SIGNALS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}

# In the second round each step takes minutes, so a signal meets workers within a step.
SLOW_SCRIPT = """
import sys, time
from pathlib import Path
import numpy as np
import torch
import fedbranch as fb

class Slow(torch.nn.Linear):
    def forward(self, x):
        if Path("run/history.jsonl").read_bytes():
            Path("is-slow").touch()
            time.sleep(300)
        return super().forward(x)

rng = np.random.default_rng(0)
clients = {
    f"c{i}": fb.ClientData((rng.normal(size=(9, 3)), rng.integers(0, 2, 9))) for i in range(4)
}
fb.fedavg(Slow(3, 2), clients, rounds=500, training=fb.LocalTraining(epochs=1), folder="run",
          engine="workers", num_workers=2)
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a configuration that uses worker processes."""
    (tmp_path / "small.toml").write_text(CONFIG)
    return tmp_path


def fedbranch(*arguments, cwd):
    return start([*COMMAND, *map(str, arguments)], cwd)


def finish(process):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output


@pytest.mark.parametrize(
    ("number", "how_often", "whole_group"),
    [(signal.SIGINT, 3, True), (signal.SIGTERM, 1, False)],  # as a hasty user, and the system
)
def test_a_signal_ends_a_run_with_one_line_and_no_worker_left(
    folder, number, how_often, whole_group
):
    code, how = SIGNALS[number]
    process = fedbranch("run", "small.toml", "--out", "parts", cwd=folder)
    wait_for_rounds(process, folder / "parts", 4)

    stopped = stop(process, *[number] * how_often, whole_group=whole_group)

    assert stopped.num_workers > 0
    assert stopped.left_running == []
    assert stopped.errors == f"fedbranch: {how}; continue with: fedbranch resume parts\n"
    assert stopped.code == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_in_the_middle_of_a_long_job_end_with_the_script(tmp_path, number):
    process = start([sys.executable, "-c", SLOW_SCRIPT], tmp_path)
    wait_until((tmp_path / "is-slow").exists)

    stopped = stop(process, number, whole_group=number == signal.SIGINT)  # as Ctrl-C does

    assert stopped.num_workers == 2
    assert stopped.left_running == []
    assert stopped.code == -number
    if number == signal.SIGINT:  # Python's own, with a hint at its end
        assert re.search(
            r"\nKeyboardInterrupt\nThe run in run can go on: .*resume=True\n$", stopped.errors
        )
        assert stopped.errors.count("Traceback") == 1
    else:
        assert stopped.errors == ""


@pytest.mark.reliability
def test_runs_stopped_at_random_moments_end_with_the_same_bytes(folder, measured):
    finish(fedbranch("run", "small.toml", "--out", "whole", cwd=folder))
    expected = folder_digest(folder / "whole", except_for="report.html")
    rng = np.random.default_rng(8)
    stops, num_equal = [], 0

    for chain, number in enumerate([*SIGNALS] * 2):
        parts = Path(f"parts-{chain}")
        # The first time while it is starting, then after some rounds; each time a bit later.
        for num_rounds in [0, *sorted(rng.choice(np.arange(1, 23), 4, replace=False))]:
            has_begun = (folder / parts / "run.json").exists()
            command = ["resume", parts] if has_begun else ["run", "small.toml", "--out", parts]
            process = fedbranch(*command, cwd=folder)
            wait_until_it_can_be_stopped(process)
            wait_for_rounds(process, folder / parts, num_rounds)
            time.sleep(rng.uniform(0, 0.3 if num_rounds < 20 else 0.1))
            stopped = stop(process, number, whole_group=chain >= 2)
            code, how = SIGNALS[number]
            assert stopped.code == code, stopped.errors
            assert stopped.errors.startswith(f"fedbranch: {how}; ")
            assert stopped.errors.count("\n") == 1
            assert stopped.left_running == []
            stops.append(stopped)
        finish(fedbranch("resume", parts, cwd=folder))
        num_equal += folder_digest(folder / parts, except_for="report.html") == expected

    assert num_equal == len(SIGNALS) * 2
    assert sum(stopped.num_workers > 0 for stopped in stops) >= 10  # not only while it starts
    slowest = max(stopped.seconds for stopped in stops)
    measured(
        "signals",
        f"{len(stops)} of {len(stops)} stopped with exit code 130 or 143, the slowest after "
        f"{slowest:.1f} s, no process left; {num_equal} of {num_equal} runs, stopped 5 times each, "
        "end with the same SHA-256",
    )
