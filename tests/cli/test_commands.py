"""What all commands share: help, version, errors in one line."""

import subprocess
import sys

import pytest

import fedbranch
from tests.cli.small_command import CONFIG, fedbranch_command


def test_version_and_help(tmp_path):
    assert fedbranch_command("--version", cwd=tmp_path).stdout.strip() == fedbranch.__version__
    text = fedbranch_command("--help", cwd=tmp_path).stdout
    assert all(command in text for command in ("demo", "run", "resume", "show"))


@pytest.mark.parametrize(
    ("command", "promised"),
    [
        ("run", ["digits-label-permutation", "the next free", "--seed", "--json"]),
        ("resume", ["A run folder.", "same result"]),
        ("show", ["A run folder.", "reason for every split"]),
        ("demo", ["four clusters", "--out"]),
    ],
)
def test_every_command_explains_its_arguments(tmp_path, command, promised):
    text = " ".join(fedbranch_command(command, "--help", cwd=tmp_path).stdout.split())

    assert all(phrase in text for phrase in promised)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rounds = 16", "rounds = -1"), "small.toml: rounds is -1; it must be at least 1"),
        (("epochs = 5", "epoch = 5"), "did you mean training.epochs?"),
        (
            ("gamma_max = 0.5", "gamma_max = 'x'"),
            "rule.gamma_max is 'x'; it must be a finite number",
        ),
    ],
)
def test_a_bad_config_is_one_line_and_exit_code_2_before_torch_is_loaded(
    tmp_path, config, change, message
):
    config.write_text(CONFIG.replace(*change))
    script = (
        "import sys; sys.argv = ['fedbranch', 'run', 'small.toml']\n"
        "from fedbranch.cli.commands import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )

    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )

    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("fedbranch: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "nothing.toml"], 2, "nothing.toml cannot be read"),
        (["run", "dmo"], 2, "did you mean 'demo'?"),
        (["show", "nowhere"], 1, "nowhere is not a run folder"),
        (["resume", "nowhere"], 1, "nowhere is not a run folder"),
        (["demo", "--seed", "-1"], 2, "seed is -1"),
        (["demo", "--out", "."], 1, "already holds something"),
    ],
)
def test_expected_errors_are_one_line(tmp_path, arguments, code, message):
    (tmp_path / "precious.txt").write_text("mine")

    result = fedbranch_command(*arguments, cwd=tmp_path, check=code)

    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
