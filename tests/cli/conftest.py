"""The small experiment as a file, and its run folder."""

import pytest

from tests.cli.small_command import CONFIG, fedbranch_command


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A folder in which `fedbranch run small.toml` has been called once."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.toml").write_text(CONFIG)
    result = fedbranch_command("run", "small.toml", cwd=folder)
    return folder, result
