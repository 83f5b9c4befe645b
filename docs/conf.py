"""How Sphinx makes a site of these pages: ``make docs``, to ``build/docs``.

The pages are plain Markdown and read as well without it. Nothing is fetched from a network.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import fedbranch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "figures"))
import leaf_phases  # noqa: E402 -- it stands beside the figure that it draws

project = "fedbranch"
author = "The fedbranch authors"
copyright = "The fedbranch authors"  # noqa: A001 -- Sphinx calls it so
version = release = fedbranch.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["figures"]
nitpicky = True
suppress_warnings = [
    "config.cache",  # functions as settings are fine without a cache
]

html_theme = "furo"
html_title = f"fedbranch {release}"
html_show_copyright = False
html_copy_source = False

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = False
napoleon_use_ivar = True  # a class says its attributes once
napoleon_use_rtype = False

nitpick_ignore_regex = [
    # Other projects' names: their inventories would have to be fetched.
    (r"py:.*", r"(numpy|np|torch|nn|flwr|cryptography|collections|pathlib|typing)(\..*)?"),
    (r"py:.*", r"NDArray|ArrayLike|Path|optional"),
    # Aliases and classes in signatures that nobody has to know in order to call something.
    (
        r"py:class",
        r"(fedbranch\..*)?(JSON|Weighting|Aggregate|OptionKeywords|EngineName|EngineChoice|BeforeSend)",
    ),
    (r"py:class", r"(fedbranch\..*)?(MapDataset|Download)"),
    (r"py:class", r"(fedbranch\..*)?(SimulatedClients|Reply|LastingTensors|Layout|Orthonormal)"),
    (
        r"py:class",
        r"(fedbranch\..*)?(EdgeCache|Expected|LeafStore|MappedTensors|PairCosines|Situation|Sums)",
    ),
    (r"py:class", r"(fedbranch\..*)?(Array|Rows|Partition|PartName|Kind|Verdict|Evaluation)"),
    (r"py:class", r"(fedbranch\..*)?(ClientRows|Data|OnProgress)"),
    (r"py:class", r"(fedbranch\..*)?Engine"),
    # Modules behind the public ones have no page.
    (r"py:mod", r"fedbranch\..*"),
]

PUBLIC_MODULES = [
    "fedbranch",
    "fedbranch.core.geometry",
    "fedbranch.core.linkage",
    "fedbranch.core.groups",
    "fedbranch.core.theory",
    "fedbranch.core.robust",
    "fedbranch.core.projection",
    "fedbranch.core.exact_cut",
    "fedbranch.core.exact_sum.total",
    "fedbranch.data",
    "fedbranch.data.sources",
    "fedbranch.data.text",
    "fedbranch.sim",
    "fedbranch.rules",
    "fedbranch.flower",
    "fedbranch.flower.testing",
    "fedbranch.flower.half_updates",
    "fedbranch.training.half_split",
    "fedbranch.privacy",
    "fedbranch.errors",
    "fedbranch.testing",
]


def public_homes() -> dict[str, str]:
    """Map the places where things are defined to the names under which they are public."""
    homes: dict[str, str] = {}
    for module_name in PUBLIC_MODULES:
        module = import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            defined_in = getattr(value, "__module__", None)
            if isinstance(defined_in, str):
                homes.setdefault(f"{defined_in}.{name}", f"{module_name}.{name}")
            homes.setdefault(name, f"{module_name}.{name}")
    return homes


def link_to_public_home(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Node | None:
    """Let a type in a signature lead to the page of its public name."""
    target = node.get("reftarget", "")
    home = app.fedbranch_homes.get(target)
    if node.get("refdomain") != "py" or home in (None, target):
        return None
    domain = env.domains.python_domain
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", home, node, content
    ) or domain.resolve_xref(env, node["refdoc"], app.builder, "class", home, node, content)


def prepare_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Fetch the project's changelog, and name what the site has no page for.

    Links out of this folder work in the repository. Here files become downloads, but folders
    and pages of elsewhere cannot: their path stands in the text.
    """
    if docname == "changelog":
        text = (ROOT / "CHANGELOG.md").read_text()
        source[0] = text.replace("](docs/", "](").replace("](experiments/", "](../experiments/")

    def named(link: re.Match[str]) -> str:
        path = Path(app.env.doc2path(docname)).parent.joinpath(link["target"]).resolve()
        is_elsewhere = not path.is_relative_to(ROOT / "docs")
        if is_elsewhere and (path.is_dir() or path.suffix in (".md", ".ipynb")):
            return f"{link['words']} (`{path.relative_to(ROOT)}`)"
        return link[0]

    source[0] = re.sub(r"\[(?P<words>[^\]]+)\]\((?P<target>\.\./[^)#]+)\)", named, source[0])


def skip_member(
    app: Sphinx, what: str, name: str, value: object, skip: bool, options: object
) -> bool | None:
    """Leave out what says nothing: the fields of named tuples stand in their signature."""
    text = getattr(value, "__doc__", None) or ""
    return True if text.startswith("Alias for field number") else None


def prepare_docstring(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Keep Napoleon, which reads them next, from taking words for types."""
    if what in ("property", "attribute") and lines:
        # It looks for a type before a colon in the first line, which may be a single word.
        lines[:1] = lines[0].split(" ", 1)
    for number, line in enumerate(lines):
        if re.fullmatch(r"\w+(, \w+)+", line):  # "joined, left" in a list of attributes
            lines[number] = line.replace(", ", ",")


def prepare_signature(
    app: Sphinx,
    what: str,
    name: str,
    value: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Write defaults that are not Python, such as ``<factory>``, as an ellipsis."""
    if signature is not None:
        signature = re.sub(r"= <[^>]*>", "= ...", signature)
    return signature, returns


def draw_leaf_phases(app: Sphinx) -> None:
    """Draw the phases of a leaf anew from the table in the code, so that they cannot go stale."""
    drawn = leaf_phases.drawing()
    if not leaf_phases.PATH.exists() or leaf_phases.PATH.read_text(encoding="utf-8") != drawn:
        leaf_phases.PATH.write_text(drawn, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Connect the above."""
    app.connect("builder-inited", draw_leaf_phases)
    app.fedbranch_homes = public_homes()
    app.connect("missing-reference", link_to_public_home)
    app.connect("source-read", prepare_page)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)
    app.connect("autodoc-process-signature", prepare_signature)
