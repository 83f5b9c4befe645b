import importlib
import inspect
import pkgutil

import pytest

import fedbranch

MODULES = [
    info.name
    for info in pkgutil.walk_packages(fedbranch.__path__, "fedbranch.")
    if info.name != "fedbranch.__main__"
]

PROMISED = {
    "ClientData", "Decision", "LocalTraining", "NeverSplit", "ParameterTree", "RoundRecord",
    "Run", "Server", "Task", "Thresholds", "Update", "bipartition", "cosine_similarity",
    "fedavg", "hierarchy", "ifca", "local", "oracle", "separation_gap", "simulate", "theory",
    "weighted_mean",
}  # fmt: skip


def test_the_promised_names_are_there():
    assert set(fedbranch.__all__) >= PROMISED


@pytest.mark.parametrize("name", fedbranch.__all__)
def test_every_public_name_exists_and_is_documented(name):
    value = getattr(fedbranch, name)

    assert inspect.getdoc(value)


def test_all_lists_every_name_that_is_not_private_or_a_module():
    names = {
        name
        for name, value in vars(fedbranch).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    } - {"TYPE_CHECKING", "import_module"}

    assert names <= set(fedbranch.__all__)


@pytest.mark.parametrize("module_name", MODULES)
def test_the_public_names_of_a_module_are_those_it_defines(module_name):
    module = importlib.import_module(module_name)
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module_name
    }

    exported = getattr(module, "__all__", [])
    assert sorted(exported) == sorted(set(exported))
    assert all(hasattr(module, name) for name in exported)
    # Whatever has a full docstring with parameters is meant for others.
    documented = {n for n in defined if "Parameters\n" in (inspect.getdoc(vars(module)[n]) or "")}
    assert documented <= set(exported)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'simulte'"):
        _ = fedbranch.simulte
