"""`fedbranch audit` finds the study in a checkout, and says how to get it where there is none."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedbranch.cli.studies import find_checkout

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


@pytest.fixture
def installed(tmp_path):
    """A folder with the package and without the studies, as after an installation."""
    path = tmp_path / "site-packages"
    shutil.copytree(SOURCE / "fedbranch", path / "fedbranch")
    return path


def run(*command, cwd, packages=SOURCE, **more):
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=cwd, env=environment, **more
    )


def fedbranch(*arguments, **more):
    # Unlike `python -m`, the installed script does not put the current folder on the path.
    script = "import sys; from fedbranch.cli.commands import main; sys.path.remove(''); main()"
    return run("-c", script, *arguments, **more)


def test_the_help_lists_the_options_without_loading_the_study(installed, tmp_path):
    result = fedbranch("audit", "--help", cwd=tmp_path, packages=installed)

    assert result.returncode == 0, result.stderr
    assert all(option in result.stdout for option in ("--quick", "--out", "--seed", "--json"))


def test_outside_a_checkout_one_line_tells_how_to_get_the_study(installed, tmp_path):
    result = fedbranch("audit", cwd=tmp_path, packages=installed)

    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert re.search("part of fedbranch's repository.*clone the repository", line)


@pytest.mark.parametrize("place", ["checkout", "elsewhere"])
def test_the_study_is_found_from_the_current_folder_or_the_package(installed, tmp_path, place):
    # The check of --out comes after the study is loaded, and before it runs.
    out = ["--out", "no-such-folder/leaks.json"]
    if place == "checkout":
        result = fedbranch("audit", *out, cwd=ROOT / "docs", packages=installed)
    else:
        result = fedbranch("audit", *out, cwd=tmp_path)

    assert result.returncode == 2
    assert "there is no folder no-such-folder" in result.stderr


def test_the_study_runs_as_a_module_with_the_same_options():
    result = run("-m", "studies.privacy_audit", "--help", cwd=ROOT)

    assert result.returncode == 0, result.stderr
    assert "--quick" in result.stdout


def test_a_folder_with_other_studies_is_no_checkout(tmp_path):
    (tmp_path / "studies" / "privacy_audit").mkdir(parents=True)
    (tmp_path / "studies" / "privacy_audit" / "__init__.py").touch()

    assert find_checkout([tmp_path], "privacy_audit") is None
    assert find_checkout([tmp_path, ROOT / "docs"], "privacy_audit") == ROOT
    assert find_checkout([ROOT], "no_such_study") is None


def test_nothing_else_in_the_package_imports_a_study():
    importing = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"^\s*(from|import) studies\b", path.read_text(), re.MULTILINE)
    }

    assert importing == {"fedbranch/cli/audit_command.py"}
