"""The page as text: what is in it, and what cannot get out of its element."""

import hashlib
import json
import re
from base64 import b64encode
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from fedbranch.report.facts.facts import read_facts
from fedbranch.report.page.page import SCRIPTS, page_of, write_page
from report.folders import split_run
from report.made_facts import made_facts

HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "<!--<script>"]


class Elements(HTMLParser):
    """All elements of a page with their attributes, and the text of scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.found, self.texts = [], {}
        self.is_inside = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.is_inside = tag in ("script", "style")

    def handle_endtag(self, tag):
        self.is_inside = False

    def handle_data(self, data):
        if self.is_inside:
            last = len(self.found) - 1
            self.texts[last] = self.texts.get(last, "") + data

    def named(self, tag):
        return [attributes for found, attributes in self.found if found == tag]

    def text_of(self, tag, **attributes):
        return [
            self.texts[i]
            for i, (found, has) in enumerate(self.found)
            if found == tag
            and all(has.get(k) == v for k, v in attributes.items())
            and i in self.texts
        ]


def policy_of(page):
    meta = next(m for m in Elements(page).named("meta") if m.get("http-equiv"))
    return dict(rule.split(" ", 1) for rule in meta["content"].split("; "))


def test_the_facts_come_back_as_they_were():
    facts = made_facts(ids=HOSTILE, num_clients=3, num_leaves=2)

    [embedded] = Elements(page_of(facts)).text_of("script", type="application/json")

    assert json.loads(embedded) == facts


def test_hostile_ids_make_no_element():
    tame = Elements(page_of(made_facts(ids=["a", "b", "c"], num_clients=3, num_leaves=2)))
    page = page_of(made_facts(ids=HOSTILE, num_clients=3, num_leaves=2))

    assert [tag for tag, _ in Elements(page).found] == [tag for tag, _ in tame.found]
    assert not any(text in page for text in HOSTILE)


def test_a_hostile_name_of_a_run_makes_no_element():
    facts = made_facts(name="</title><script>alert(1)</script>{{script}}")

    page = page_of(facts)

    assert len(Elements(page).named("script")) == 2
    assert page.count("use strict") == 1  # what looks like a place to fill is left alone


def test_only_its_own_script_and_style_may_run():
    page = page_of(made_facts())
    elements = Elements(page)
    script, style = elements.text_of("script")[-1], elements.text_of("style")[0]

    policy = policy_of(page)

    assert policy["default-src"] == "'none'"
    for rule, text in (("script-src", script), ("style-src", style)):
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"


def test_only_the_live_page_may_ask_its_server():
    assert policy_of(page_of(made_facts()))["connect-src"] == "'none'"
    assert policy_of(page_of(made_facts(), live=True))["connect-src"] == "'self'"


def test_nothing_is_loaded_from_elsewhere():
    elements = Elements(page_of(made_facts()))

    addresses = [
        value for _, attributes in elements.found for name, value in attributes.items()
        if name in ("src", "href")
    ]  # fmt: skip

    assert set(addresses) == {"data:,", "#main"}


def test_every_script_is_in_the_page_and_none_makes_elements_from_text():
    assets = files("fedbranch.report.page") / "assets"
    scripts = {entry.name for entry in assets.iterdir() if entry.name.endswith(".js")}

    assert set(SCRIPTS) == scripts
    for name in scripts:
        text = (assets / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert "</script" not in text


def test_a_hundred_clients_over_200_rounds_take_less_than_2_mb():
    facts = made_facts(num_clients=100, num_leaves=10, rounds=200)

    assert len(page_of(facts).encode()) < 2e6


def test_every_drawing_function_of_the_scripts_is_called():
    """It is a part of the page, or another function calls it; otherwise nothing would show."""
    assets = files("fedbranch.report.page") / "assets"
    scripts = "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS)
    parts = set(re.findall(r"\w+", re.search(r"const PARTS = \[(.*?)\]", scripts, re.S)[1]))
    drawing = set(re.findall(r"^function (draw[A-Z]\w*)", scripts, re.M))
    called = set(re.findall(r"(?<!function )\b(draw[A-Z]\w*)\(", scripts))

    assert parts <= drawing
    assert drawing - called <= parts


def test_made_facts_have_the_fields_of_those_that_are_read(tmp_path):
    [made], [read] = made_facts()["runs"], read_facts([split_run(tmp_path)])["runs"]

    assert made.keys() == read.keys()
    for name in ("clients", "truth", "series"):
        assert made[name].keys() == read[name].keys(), name
    for name in ("metrics", "nodes", "decisions", "similarities"):
        assert made[name][0].keys() == read[name][0].keys(), name


def test_other_schemas_are_refused():
    with pytest.raises(ValueError, match=r"schema 2, the page shows 1; read them again"):
        page_of({**made_facts(), "schema": 2})


def test_numbers_that_json_does_not_have_are_refused():
    facts = made_facts()
    facts["runs"][0]["nodes"][0]["last"]["loss"] = float("nan")

    with pytest.raises(ValueError, match="not JSON compliant"):
        page_of(facts)


def test_the_page_is_written_whole(tmp_path):
    facts = made_facts()

    write_page(facts, tmp_path / "report.html")

    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page_of(facts)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
