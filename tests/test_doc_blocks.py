"""Every code block of the documents is run, as a reader would run it.

The blocks of a page run from top to bottom in one namespace and one empty folder. A page whose
blocks need something that only its reader has (data, a federation) has a companion here: a
generator that sets names before each block of Python, with one ``yield`` for each. Commands are
checked against the command line, and run if they are cheap: if the run folder that they name
is there. Blocks of ``text`` show output and are not code.
"""

import ast
import re
import shlex
import tomllib
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import fedbranch as fb
from fedbranch.cli.commands import app as command_line
from fedbranch.cli.experiment import Experiment

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))]
LANGUAGES = {"python", "sh", "toml", "text"}

# What no test can do as it stands; it is done so instead.
SHORTENED = {
    "num_rounds=100": "num_rounds=3",  # minutes
    "/var/lib/federation": "federation",  # a folder of the machine's
    "timeout=600": "timeout=5",  # nobody is late in these grids
}
NOT_RUN = {
    "fedbranch watch": "serves a page until it is stopped; tests of its own start and stop it",
    "fedbranch data": "fetches over a network; tests of its own have a server",
    "fedbranch audit": "takes minutes; tests of its own run parts of it",
    "fedbranch demo": "takes half a minute; tests of its own run it",
    "fedbranch run": "the file is the reader's; presets have tests of their own",
    "fedbranch resume": "the folder is the reader's; tests of their own interrupt runs",
    "make": "builds and tests the project itself",
    "pip": "installs",
}


def blocks_of(page):
    text = (ROOT / page).read_text()
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [(language, code) for language, code in found if not language.startswith("{")]


# Companions


def readme(names, folder, monkeypatch):
    from flwr.app import ArrayRecord

    from flower.federations import make_grid, make_model

    def hospital(seed, is_reversed):
        x = np.random.default_rng(seed).normal(size=(80, 5)).astype(np.float32)
        y = ((x[:, 0] > 0) ^ is_reversed).astype(np.int64)
        return x[:60], y[:60], x[60:], y[60:]

    names["your_data"] = {f"hospital-{i}": hospital(i, bool(i % 2)) for i in range(6)}
    yield
    assert sorted(map(len, names["run"].clusters.values())) == [3, 3]
    yield
    readings = {f"sensor-{i}": np.float32([1, 1 - 2 * (i % 2)]) for i in range(6)}
    names.update(num_params=2, rounds=3, client_ids=list(readings), num_examples=9)
    names["train"] = lambda client_id, params: 0.5 * (readings[client_id] - params)
    yield
    assert names["record"].round == 3
    assert not names["record"].refused
    names.update(grid=make_grid(), arrays=ArrayRecord(make_model().state_dict()))
    yield


def data(names, folder, monkeypatch):
    """The published sets are small ones here, in the true formats."""
    import data.sources.small_sets as small
    from fedbranch.data.sources import images, texts
    from fedbranch.sim import mlp

    for module, name, small_set in [
        (images, "MNIST", small.small_mnist()),
        (images, "CIFAR10", small.small_cifar()),
        (texts, "AG_NEWS", small.small_news()),
        (texts, "SHAKESPEARE", small.small_plays()),
    ]:
        monkeypatch.setattr(module, name, small_set)
    sets = folder / "data"
    small.put(sets / "mnist", small.idx_files())
    small.put(sets / "cifar-10-batches-bin", small.cifar_files())
    small.put(sets / "ag_news", {f"{part}.csv": small.news_csv(part) for part in small.ARTICLES})
    small.put(sets / "shakespeare", {"roles.jsonl": small.roles_jsonl()})
    monkeypatch.setenv("FEDBRANCH_DATA", str(sets))
    yield
    assert fb.simulate(mlp([4], 2, hidden=[], seed=0), names["clients"], rounds=1).evaluation
    yield
    assert names["client"].train.x.shape == (2, 2)
    yield
    assert fb.simulate(names["model"], names["wards"], rounds=1).clusters
    yield
    assert {client.group for client in names["clients"].values()} == {"0", "1", "2"}
    yield
    assert names["x"].dtype == np.uint8  # the last that was read: raw
    assert len(names["texts"]) == len(names["topics"])
    assert names["roles"]


def flower(names, folder, monkeypatch):
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from fedbranch.flower import ClusteredStrategy
    from fedbranch.flower.testing import FakeGrid, FakeNode
    from flower.federations import make_client_app, make_clients, make_grid, make_model

    arrays = ArrayRecord(make_model().state_dict())
    names.update(grid=make_grid(), arrays=arrays, client_id="partition-0000")
    yield
    assert not names["grid"].errors
    assert names["result"].assignments["partition-0000"] == 0

    # A least-squares model, so that the page's client app has something to train.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    y = x @ np.float32([1, -2, 3])

    def fit(model, x, y):
        return {"weight": model["weight"] - 0.1 * x.T @ (x @ model["weight"] - y) / len(y)}

    names.update(
        app=ClientApp(), ArrayRecord=ArrayRecord, Array=Array, Message=Message,
        MetricRecord=MetricRecord, RecordDict=RecordDict, x=x, y=y, x_test=x, y_test=y, my_seed=7,
        fit=fit,
        load=lambda message: {n: a.numpy() for n, a in message.content["arrays"].items()},
        loss=lambda model, x, y: float(np.mean((x @ model["weight"] - y) ** 2)),
    )  # fmt: skip
    yield
    halving = FakeGrid(names["app"], [FakeNode.simulated(i, 4) for i in range(4)])
    strategy = ClusteredStrategy(half_updates=True)
    start = ArrayRecord({"weight": Array(np.zeros(3, np.float32))})
    result = strategy.start(halving, start, num_rounds=4, timeout=5)
    assert not halving.errors
    asked = [m.content["config"] for m in halving.sent if m.metadata.message_type == "train"]
    assert any("fedbranch-halves" in config for config in asked)
    assert result.history[-1].record.refused == {}
    yield
    folded = names["strategy"].start(make_grid(), arrays, num_rounds=2, timeout=5)
    assert not folded.history[-1].record.refused

    names.update(
        client_app=make_client_app(make_clients(), make_model()),
        strategy=ClusteredStrategy(),
        arrays=arrays,
    )
    yield


def privacy(names, folder, monkeypatch):
    import math

    import torch
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp

    from fedbranch.flower import reveal
    from fedbranch.flower.testing import FakeGrid, FakeNode
    from fedbranch.privacy import Identity
    from flower.federations import make_client_app, make_clients, make_model

    yield
    names.update(
        Path=Path, np=np, math=math, torch=torch, ArrayRecord=ArrayRecord, ClientApp=ClientApp,
        Net=make_model,
    )  # fmt: skip
    yield
    nodes, fingerprints = [], []
    for i in range(10):
        identity, memory = Identity.new(), folder / f"memory-{i}"
        (folder / f"identity-{i}").write_bytes(identity.to_pem())
        fingerprints.append(identity.fingerprint)
        node = FakeNode.simulated(i, 10)
        own = {"identity": f"identity-{i}", "roster": "roster", "memory": str(memory)}
        nodes.append(replace(node, config={**node.config, **own}))
    (folder / "roster").write_text("\n".join(fingerprints))
    plain = make_client_app(make_clients(10), make_model())  # what the client app was before
    for register in (names["app"].train(), names["app"].evaluate()):
        register(plain)
    names["grid"] = FakeGrid(names["app"], nodes)
    yield
    assert not names["grid"].errors
    context = next(iter(names["grid"]._contexts.values()))
    secret = names["agreement"].secret(context)
    names.update(reveal=reveal, secret=secret, client_id="partition-0003")
    plain_model = names.pop("model")
    yield
    assert names["model"].keys() == make_model().state_dict().keys()
    yield
    strategy = names["Welcoming"]()
    strategy.agreed = names["agreed"]
    strategy.start(names["grid"], names["arrays"], num_rounds=2, timeout=5)
    assert not names["grid"].errors
    yield
    names["model"] = plain_model  # the one that the page began with
    yield
    assert set(names["run"].epsilons(delta=1e-5)) == set(names["clients"])


def guide(names, folder, monkeypatch):
    num_blocks = sum(language == "python" for language, _ in blocks_of("docs/guide.md"))
    yield from [None] * num_blocks
    assert [move.client_id for e in names["run"].history for move in e.record.routed] == [
        "hospital-9"
    ]


COMPANIONS = {
    "README.md": readme,
    "docs/data.md": data,
    "docs/flower.md": flower,
    "docs/guide.md": guide,
    "docs/privacy.md": privacy,
}


# Commands


def commands_of(code):
    """The commands of a block for the shell, without comments, lines joined."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_command(words, folder):
    program, *arguments = words
    text = " ".join(words)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(arguments) <= set(targets), text
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = set(re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*?)\]", text))))
        assert extras <= project["optional-dependencies"].keys(), text
    elif program == "python":
        script = Path(arguments[0])
        assert (ROOT / script).exists() or arguments[0] == "-m", text
    else:
        assert program == "fedbranch", f"{text}: say in this module how to check it"
        parse(arguments)
        is_cheap = not any(text.startswith(start) for start in NOT_RUN)
        if is_cheap and any((folder / word / "run.json").exists() for word in arguments):
            result = CliRunner().invoke(command_line, arguments, catch_exceptions=False)
            assert result.exit_code == 0, result.output


def parse(arguments):
    """Parse as the command line does, without doing anything; exits on a mistake."""
    group = typer.main.get_command(command_line)
    with group.make_context("fedbranch", list(arguments)) as context:
        if context._protected_args or context.args:
            name, command, rest = group.resolve_command(
                context, [*context._protected_args, *context.args]
            )
            command.make_context(name, rest, parent=context)


# The tests


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page):
    assert {language for language, _ in blocks_of(page)} <= LANGUAGES


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    has_companion = page in COMPANIONS
    companion = COMPANIONS[page](names, tmp_path, monkeypatch) if has_companion else repeat(None)
    first_experiment = None
    for language, code in blocks_of(page):
        if language == "python":
            for long, short in SHORTENED.items():
                code = code.replace(long, short)
            next(companion)  # a companion has one step for each block
            exec(compile(code, page, "exec"), names)
        elif language == "sh":
            for words in commands_of(code):
                check_command(words, tmp_path)
        elif language == "toml":
            table = tomllib.loads(code)
            if first_experiment is None:
                first_experiment = code
                Experiment.parse(code, page)
            else:  # a section, to be put in place of the page's first one
                (section,) = table
                before = first_experiment[: first_experiment.index(f"[{section}]")]
                Experiment.parse(before + code, page)
    if has_companion:
        with pytest.raises(StopIteration):  # it checks the last block, and has no step too many
            next(companion)


def test_a_mistake_in_a_command_is_found():
    with pytest.raises(Exception, match="No such option"):
        parse(["show", "runs/demo-1", "--wy"])
    with pytest.raises(Exception, match="No such command"):
        parse(["shwo", "runs/demo-1"])


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_blocks_use_public_names(page):
    used = {
        node.attr
        for language, code in blocks_of(page)
        if language == "python"
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "fb"
    }
    assert used <= set(fb.__all__)
