import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *options):
    result = subprocess.run(
        [sys.executable, *options, EXAMPLES / name],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def test_quickstart():
    output, _ = run("quickstart.py")

    assert "hospital-0, hospital-2, hospital-4" in output
    assert "hospital-1, hospital-3, hospital-5" in output
    assert "round" in output


def test_any_loop_finds_the_makes_without_loading_torch():
    output, loaded = run("any_loop.py", "-X", "importtime")

    for first in range(3):
        assert ", ".join(f"sensor-{i:02d}" for i in range(first, 12, 3)) in output
    assert "fedbranch.server" in loaded
    assert " torch" not in loaded
