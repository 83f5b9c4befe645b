"""What the documents say must be so."""

import re
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from fedbranch import AutoRule, Thresholds, __version__
from fedbranch.cli.experiment import Data, Experiment, Model, Training, preset_names

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PUBLIC_MODULES = [
    "fedbranch",
    *(f"fedbranch.core.{name}" for name in ("linkage", "geometry", "robust", "groups", "theory")),
    *(f"fedbranch.{name}" for name in ("data", "errors", "flower", "privacy", "sim", "testing")),
]


def code_blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_the_documented_experiment_names_every_setting():
    text, thresholds = code_blocks(ROOT / "docs" / "experiments.md", "toml")

    known = {item.name for item in fields(Thresholds)}
    assert set(tomllib.loads(thresholds)["rule"]) == known
    table = tomllib.loads(text)
    sections = {"data": Data, "model": Model, "training": Training, "rule": AutoRule}
    for name, section in sections.items():
        known = {item.name for item in fields(section)} - {"steps"}
        assert set(table[name]) == known
    assert set(table) == {item.name for item in fields(Experiment)}


def test_every_preset_is_documented():
    text = (ROOT / "docs" / "experiments.md").read_text()

    assert all(f"`{name}`" in text for name in preset_names())


def test_the_map_names_every_room():
    rooms = {
        path.stem if path.is_file() else path.name
        for path in (ROOT / "src" / "fedbranch").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    } - {"__init__", "__main__"}
    named = set(re.findall(r"^\| `(\w+)/?` \|", (ROOT / "docs/architecture.md").read_text(), re.M))

    assert named == rooms


def test_the_versions_agree():
    assert f"version: {__version__}" in (ROOT / "CITATION.cff").read_text()
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    names = {
        re.match(r"[\w-]+", requirement)[0]
        for requirements in [project["dependencies"], *extras]
        for requirement in requirements
    } - {"fedbranch"}
    reasons = (ROOT / "docs" / "architecture.md").read_text().split("## Dependencies")[1]

    assert all(name in reasons for name in names)


def test_the_api_reference_has_every_public_name():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    whole = set(re.findall(r"automodule:: ([\w.]+)", pages))
    listed = set(
        re.findall(
            r"(?:autoclass|autofunction|autodata|automodule|data):: [\w.]*?(\w+)$", pages, re.M
        )
    )
    listed |= {name for module in whole for name in import_module(module).__all__}

    for module in PUBLIC_MODULES:
        assert set(import_module(module).__all__) <= listed, module


def test_the_site_has_every_page():
    """What no table of contents names is built, but nobody finds it; Sphinx only warns of it."""
    index = (ROOT / "docs" / "index.md").read_text()
    entries = set(re.findall(r"^([\w/-]+)$", index, flags=re.M))

    assert entries == {p.stem for p in (ROOT / "docs").glob("*.md")} - {"index"} | {"api/index"}
