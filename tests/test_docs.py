"""What the documents say must be so."""

import re
import runpy
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from fedbranch import AutoRule, Guard, ServerOptions, Thresholds, __version__
from fedbranch.cli.data_settings import Data
from fedbranch.cli.experiment import Experiment, preset_names
from fedbranch.cli.server_settings import (
    InMemoryCache,
    MultiKrum,
    OnDiskCache,
    SketchedCache,
    TrimmedMean,
)
from fedbranch.cli.training_settings import Model, Training
from fedbranch.server.leaf import Event

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


def names_of(settings):
    return {item.name for item in fields(settings)}


def test_the_documented_experiment_names_every_setting():
    page = ROOT / "docs" / "experiments.md"
    first, *others = map(tomllib.loads, code_blocks(page, "toml"))

    sections = {
        "data": Data, "model": Model, "training": Training, "rule": AutoRule, "guard": Guard,
        "cache": InMemoryCache,
    }  # fmt: skip
    assert set(first) == names_of(Experiment)
    for name, settings in sections.items():
        assert set(first[name]) == names_of(settings) - {"steps"}
    caches_and_rule = [SketchedCache, OnDiskCache, Thresholds]
    for table, settings in zip(others, caches_and_rule, strict=True):
        (section,) = table.values()
        assert set(section) == names_of(settings)
    aggregates = re.findall(r"`(aggregate = \{.*?\})`", page.read_text())
    for line, settings in zip(aggregates, [TrimmedMean, MultiKrum], strict=True):
        assert set(tomllib.loads(line)["aggregate"]) == names_of(settings)


def test_every_option_of_a_server_is_a_setting_of_an_experiment():
    assert names_of(ServerOptions) <= names_of(Experiment)


def test_the_documented_guard_is_the_default_one():
    first = tomllib.loads(code_blocks(ROOT / "docs" / "experiments.md", "toml")[0])

    assert Guard(**first["guard"]) == Guard()


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


def test_the_diagram_of_phases_is_drawn_from_the_table():
    script = runpy.run_path(str(ROOT / "docs" / "figures" / "leaf_phases.py"))

    assert script["PATH"].read_text(encoding="utf-8") == script["drawing"](), (
        "docs/figures/leaf-phases.svg is not what the table says; run make docs, which draws it"
    )
    for event in Event:
        assert event.value in script["drawing"]()
