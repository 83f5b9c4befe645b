"""The facts of runs as one page: a single HTML file that needs nothing but a browser.

The page's parts are in ``assets/``: a template, a style sheet and small scripts, one idea each.
The scripts are put one after the other into one inline script. Nothing is built or fetched.

Clients choose their names, and refusals quote what clients sent. So facts enter the page as JSON
that cannot end its element, and the scripts show them as text only. The page's policy allows no
script, style or request but its own.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from base64 import b64encode
from importlib.resources import files
from pathlib import Path

from fedbranch.report.facts.facts import SCHEMA
from fedbranch.storage.atomic import replace_file
from fedbranch.types import JSON

__all__ = ["page_of", "write_page"]

# In the order in which they build on each other.
SCRIPTS = (
    "dom.js", "state.js", "colours.js", "theme.js", "plot.js", "header.js", "tree.js", "panel.js",
    "curves.js", "matrix.js", "table.js", "truth.js", "compare.js", "live.js", "main.js",
)  # fmt: skip


def page_of(facts: JSON, *, live: bool = False) -> str:
    """Return the page that shows the facts of one or more runs.

    Parameters
    ----------
    facts
        What :func:`fedbranch.report.facts.facts.read_facts` returned.
    live
        Whether the page asks its own server for newer facts.

    Raises
    ------
    ValueError
        If the facts are of another schema, or hold NaN or infinity.
    """
    if facts.get("schema") != SCHEMA:
        raise ValueError(
            f"facts have schema {facts.get('schema')!r}, the page shows {SCHEMA}; "
            "read them again with this version of fedbranch"
        )
    style = _asset("page.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_asset, SCRIPTS)) + "})();\n"
    names = ", ".join(run["name"] for run in facts["runs"]) or "Waiting for the run to begin"
    parts = {
        "live": "true" if live else "false",
        "policy": _policy(style, script, live=live),
        "version": html.escape(str(facts.get("fedbranch", ""))),
        "title": html.escape(f"{names} – fedbranch"),
        "style": style,
        "facts": _embedded(facts),
        "script": script,
    }
    # In one pass, so that the content of a part is never taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def write_page(facts: JSON, path: Path) -> None:
    """Write the page to a file, as a whole or not at all.

    Raises
    ------
    CannotWrite
        If the disk is full or refuses the file.
    """
    replace_file(path, page_of(facts).encode(errors="replace"))


def _asset(name: str) -> str:
    return (files("fedbranch.report.page") / "assets" / name).read_text(encoding="utf-8")


def _embedded(facts: JSON) -> str:
    """Return JSON in which no text can end the element around it, or begin another."""
    text = json.dumps(facts, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _policy(style: str, script: str, *, live: bool) -> str:
    """Return a policy that allows the page's own script and style, and nothing else."""
    rules = [
        "default-src 'none'",
        f"script-src '{_digest(script)}'",
        f"style-src '{_digest(style)}'",
        "img-src data:",
        "connect-src 'self'" if live else "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
    ]
    return "; ".join(rules)


def _digest(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()
