"""The page in a real browser: what people click, press and see.

The browser is Chromium, found by $CHROMIUM or on the path; `make test-browser` installs it on
Debian. Screenshots go to the folder $FEDBRANCH_SCREENSHOTS, if it is set.
"""

import csv
import io
import os
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from fedbranch.report.facts.facts import read_facts
from fedbranch.report.page.live import serving
from fedbranch.report.page.page import write_page
from report.growing_run import GrowingRun
from report.made_facts import made_comparison, made_facts, made_run

pytestmark = pytest.mark.browser

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SECONDS_TO_OPEN = 2.0
HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "=1+1", "<b>b</b>"]


@pytest.fixture(scope="module")
def browser():
    found = shutil.which(os.environ.get("CHROMIUM") or "chromium")
    assert found, "there is no chromium here; install it, or name one with CHROMIUM=..."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A page that is open, and everything that it asked for or complained about."""

    def __init__(self, browser, **settings):
        self.context = browser.new_context(**{"color_scheme": "light", **settings})
        self.page = self.context.new_page()
        self.complaints, self.requests, self.dialogs = [], [], []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog), dialog.dismiss()))

    def open(self, address):
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready]", timeout=20_000)
        return self.page


@pytest.fixture
def visit(browser):
    """Open pages that must not complain, ask, nor load anything but themselves."""
    visits = []

    def open_page(address, **settings):
        visits.append((visit := Visit(browser, **settings), address))
        return visit.open(address)

    yield open_page
    for visit, address in visits:
        visit.context.close()
        assert visit.complaints == []
        assert visit.dialogs == []
        own = {address.split("#")[0], address + "facts.json"}
        assert {url.split("#")[0] for url in visit.requests} <= own | {"data:,"}


@pytest.fixture
def show(visit, tmp_path):
    """Write facts as a page and open it from its file."""

    def show(facts, *, fragment="", **settings):
        path = tmp_path / "report.html"
        write_page(facts, path)
        return visit(path.as_uri() + fragment, **settings)

    return show


@pytest.fixture
def run(tmp_path):
    """A real run: six clients, two groups, split in round 7."""
    run = GrowingRun(tmp_path / "run")
    run.play(20)
    run.finish()
    return run


@pytest.fixture
def page(run, show):
    return show(read_facts([run.folder]))


def column(page, number):
    cells = page.locator(f"#table tbody tr > :nth-child({number})")
    return [text.strip() for text in cells.all_inner_texts()]


def names(page):
    return column(page, 1)


def width_to_scroll(page):
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


# A real run


def test_the_report_says_what_happened(page):
    expect(page.locator("h1")).to_have_text("runCFL")
    expect(page.locator("#summary")).to_contain_text(
        re.compile(r"^6 clients split into 2 clusters in round 7; mean accuracy 0\.9\d\d; ")
    )
    expect(page.locator("#summary")).to_contain_text("the clusters are exactly the true groups")
    expect(page.locator("#panel")).to_contain_text("Why each cluster was split")
    expect(page.locator("#truth-words")).to_contain_text("adjusted Rand index 1.000")


def test_a_click_on_a_cluster_selects_it_everywhere(page):
    page.locator('#tree [data-node="2"]').click()

    assert names(page) == ["b0", "b1", "b2"]
    expect(page.locator("#count")).to_have_text("3 clients of 6")
    expect(page.locator("#panel h3")).to_have_text("Cluster 2")
    expect(page.locator("#selection")).to_have_text("Cluster 2, 3 clients")
    expect(page.locator('#tree [data-node="2"]')).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#curves .line.thin")).to_have_count(3)
    assert page.evaluate("location.hash") == "#cluster-2"

    page.locator("#filter-off").click()

    assert len(names(page)) == 6
    expect(page.locator("#panel h3")).to_have_text("Why")
    assert page.evaluate("location.hash") == ""


def test_a_legend_and_a_link_select_as_well(page):
    page.locator("#curves .legend button", has_text="Cluster 1").click()
    assert names(page) == ["a0", "a1", "a2"]

    page.locator("#panel button", has_text="all clients").click()
    assert len(names(page)) == 6
    expect(page.locator("#panel")).to_contain_text("Rounds")


def test_the_address_selects(run, show):
    page = show(read_facts([run.folder]), fragment="#cluster-1")

    assert names(page) == ["a0", "a1", "a2"]


def test_examinations_are_in_words(page):
    page.locator('#tree [data-node="0"]').click()
    page.locator("#panel summary").last.click()

    expect(page.locator("#panel")).to_contain_text("splits into cluster 1, cluster 2")
    expect(page.locator("#panel details[open]")).to_contain_text("6 clients answered")


def test_the_matrix_names_the_pair_under_the_pointer(page):
    matrix = page.locator("#matrix")
    matrix.scroll_into_view_if_needed()
    box = matrix.bounding_box()
    cell = (box["width"] - 12) / 6

    matrix.hover(position={"x": 12 + 4.5 * cell, "y": 12 + 0.5 * cell})

    expect(page.locator("#pair")).to_have_text(
        re.compile(r"^a\d \(cluster 1\) and b\d \(cluster 2\): cosine −0\.\d\d|−1\.00$")
    )


def test_the_curves_tell_the_values_of_a_round(page):
    page.locator("#curves svg[role=img]").hover(position={"x": 400, "y": 100})

    told = page.locator("#curves .legend .value").all_inner_texts()
    assert any(re.fullmatch(r"0\.\d{3}", text) for text in told)
    # The charts below are read at the same round.
    name = page.locator("#curves .cursor-name").text_content()
    assert re.fullmatch(r"round \d+", name)
    expect(page.locator("#norms .cursor-name")).to_have_text(name)


# Tables


@pytest.mark.parametrize("number", range(1, 9))
def test_every_column_sorts_both_ways(show, number):
    page = show(made_facts())
    heading = page.locator(f"#table thead th:nth-child({number})")
    before = heading.get_attribute("aria-sort")

    heading.get_by_role("button").click()
    first, ways = column(page, number), [heading.get_attribute("aria-sort")]
    heading.get_by_role("button").click()
    second = column(page, number)
    ways.append(heading.get_attribute("aria-sort"))

    assert before == ("ascending" if number == 1 else "none")
    assert set(ways) == {"ascending", "descending"}
    down = first if ways[0] == "descending" else second
    assert down == sorted(down, key=sort_key, reverse=True)
    assert [sort_key(text) for text in down] == [
        sort_key(text) for text in (second if down is first else first)[::-1]
    ]


def sort_key(text):
    numbers = re.findall(r"[+−]?[\d.]+", text)
    return float(numbers[-1].replace("−", "-")) if numbers else text


def test_search_finds_by_name_group_and_cluster(show):
    page = show(made_facts())

    page.locator("#search").fill("CLIENT-1")
    by_name = names(page)
    page.locator("#search").fill("cluster 4")
    by_cluster = names(page)
    page.locator("#search").fill("nobody")
    nobody = names(page)

    assert by_name == ["client-1", *(f"client-{i}" for i in range(10, 20))]
    assert by_cluster == [f"client-{i}" for i in range(5, 10)]
    assert nobody == []
    expect(page.locator("#count")).to_have_text("0 clients of 20")


def test_reasons_of_refusals_unfold(show):
    page = show(made_facts())
    button = page.locator("#table button[aria-expanded]")

    button.click()

    expect(button).to_have_attribute("aria-expanded", "true")
    expect(page.locator(".reasons")).to_contain_text("round 3: its update contains NaN")
    expect(page.locator(".reasons")).to_contain_text("and 5 earlier ones")
    button.click()
    expect(page.locator(".reasons")).to_have_count(0)


def test_clients_who_left_are_not_counted_as_present(show):
    facts = made_facts(num_clients=20)
    (root,) = (node for node in facts["runs"][0]["nodes"] if node["parent"] is None)
    root["num_clients"] = 17

    page = show(facts)

    expect(page.locator("#summary")).to_contain_text("17 clients (of 20) split into")


def test_the_csv_has_the_rows_that_are_shown_and_no_formula(show, tmp_path):
    facts = made_facts(ids=[*HOSTILE, *(f"c{i}" for i in range(16))])
    page = show(facts)
    page.locator('#tree [data-node="3"]').click()

    with page.expect_download() as download:
        page.locator("#csv").click()
    download.value.save_as(tmp_path / "clients.csv")
    text = (tmp_path / "clients.csv").read_bytes().decode()
    header, *rows = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""))

    assert text.startswith("\ufeff")  # or spreadsheets take it for another encoding
    assert header[:4] == ["id", "client", "cluster", "true group"]
    assert {row[0] for row in rows} == {*HOSTILE, "c0"} - {"=1+1"} | {"'=1+1"}


def test_ten_thousand_clients_open_in_two_seconds(browser, tmp_path):
    write_page(made_facts(num_clients=10_000, num_leaves=20), tmp_path / "large.html")
    seconds = []
    for _ in range(3):
        visit = Visit(browser)
        page = visit.open((tmp_path / "large.html").as_uri())
        seconds.append(int(page.locator("html").get_attribute("data-ready")) / 1000)
        shown = len(names(page))
        visit.context.close()

    assert min(seconds) < SECONDS_TO_OPEN
    assert shown == 100  # a page of them
    assert visit.complaints == []


def test_pages_of_clients_turn(show):
    page = show(made_facts(num_clients=250))

    page.get_by_role("button", name="Next").click()
    expect(page.locator("#pages")).to_contain_text("page 2 of 3")
    assert names(page)[0] == "client-100"

    page.locator("#search").fill("client-24")
    assert names(page) == ["client-24", *(f"client-{i}" for i in range(240, 250))]


# Looks


def test_the_theme_switches_and_is_remembered(page):
    def background():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = background()
    page.get_by_role("button", name="Switch to dark colours").click()
    dark = background()
    page.reload()

    assert light != dark
    assert background() == dark
    expect(page.get_by_role("button", name="Switch to light colours")).to_be_visible()


def test_the_theme_is_the_systems_at_first(run, show):
    page = show(read_facts([run.folder]), color_scheme="dark")

    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_paper_is_white(run, show):
    page = show(read_facts([run.folder]), color_scheme="dark")

    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.evaluate("dispatchEvent(new Event('afterprint'))")

    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


@pytest.mark.parametrize("num_leaves", [1, 4, 40])
def test_a_phone_scrolls_down_only(show, num_leaves):
    facts = made_facts(num_clients=100, num_leaves=num_leaves, name="a-long-name" * 9)
    facts["comparison"] = made_comparison()
    page = show(facts, viewport={"width": 360, "height": 740})

    assert width_to_scroll(page) <= 0
    page.locator('#tree [data-node="0"]').click()
    assert width_to_scroll(page) <= 0


@pytest.mark.parametrize("num_leaves", [2, 30, 100])
def test_no_two_leaves_lie_on_each_other(show, num_leaves):
    page = show(made_facts(num_clients=300, num_leaves=num_leaves, split_every=1))

    boxes = [disc.bounding_box() for disc in page.locator("#tree .leaf .disc").all()]

    assert len(boxes) == num_leaves
    boxes.sort(key=lambda box: box["y"])
    assert all(a["y"] + a["height"] <= b["y"] for a, b in pairwise(boxes))


def test_clusters_of_one_colour_differ_in_dash(show):
    page = show(made_facts(num_clients=300, num_leaves=30, split_every=1))

    looks = page.evaluate(
        "[...document.querySelectorAll('#curves .legend button')]"
        ".filter((b) => b.textContent.startsWith('Cluster'))"
        ".map((b) => b.querySelector('line'))"
        ".map((l) => l.style.stroke + '/' + l.getAttribute('stroke-dasharray'))"
    )

    assert len(looks) == len(set(looks)) == 30


def test_a_metric_and_its_scale_are_chosen(show):
    page = show(made_facts())

    page.locator("#metric").select_option("loss")
    expect(page.locator("#curves-title")).to_have_text("loss on held-out data")
    expect(page.locator("#log")).to_be_checked()
    logarithmic = page.locator("#curves .line").last.get_attribute("d")
    page.locator("#log").uncheck()

    assert page.locator("#curves .line").last.get_attribute("d") != logarithmic
    expect(page.locator("#table thead")).to_contain_text("loss, own model")


def test_another_run_is_chosen_and_compared(show):
    facts = made_facts()
    facts["runs"].append(made_run(name="made-2", seed=1, num_leaves=2))
    facts["comparison"] = made_comparison()
    page = show(facts)

    page.locator("#run").select_option("1")

    expect(page.locator("h1")).to_contain_text("made-2")
    expect(page.locator("#tree .leaf")).to_have_count(2)
    expect(page.locator("#comparison .band")).to_have_count(3)
    expect(page.locator("#comparison-words")).to_contain_text("CFL (3 runs) ends at 0.939")
    expect(page.locator("#comparison tbody tr")).to_have_count(3)
    assert page.evaluate("location.hash") == "#run-2"


# Everybody


def test_the_keyboard_is_enough(page):
    def focused():
        return page.evaluate("document.activeElement.getAttribute('aria-label') ?? ''")

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert focused().startswith("All clients, 6 clients")

    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert focused().startswith("Cluster 2, 3 clients")
    page.keyboard.press("Enter")
    assert names(page) == ["b0", "b1", "b2"]
    assert focused().startswith("Cluster 2")  # drawn again, but not lost
    page.keyboard.press("Escape")
    assert len(names(page)) == 6

    page.locator("#matrix").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#pair")).to_contain_text("cosine")
    page.locator("#curves svg[role=img]").focus()
    page.keyboard.press("End")
    expect(page.locator("#aloud")).to_contain_text("Round 20: Cluster 1")


def test_focus_is_seen(page):
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")

    width = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")

    assert width == "2px"


def test_every_figure_is_told_in_words(show):
    facts = made_facts()
    facts["comparison"] = made_comparison()
    page = show(facts)

    for figure in page.locator("main figure").all():
        words = figure.locator("figcaption").all_inner_texts()
        words += [
            element.get_attribute("aria-label") for element in figure.locator("[role=img]").all()
        ]
        assert any(re.search(r"\d\.\d", text) for text in words), words
    page.locator("#curves-table summary").click()
    expect(page.locator("#curves-table tbody tr")).to_have_count(7)


def test_every_control_has_a_name(page):
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, select, input')].filter((e) =>"
        " !(e.ariaLabel || e.textContent.trim() || e.labels?.length) && !e.hidden).map((e) => e.id)"
    )

    assert nameless == []


def test_hostile_ids_are_shown_and_do_nothing(show):
    ids = [*HOSTILE, *(f"c{i}" for i in range(16))]
    facts = made_facts(ids=ids, name="<svg onload=alert(1)>")
    run = facts["runs"][0]
    run["clients"]["names"][0] = "<script>alert(2)</script>"
    run["decisions"][0]["reason"] = "<img src=x onerror=alert(3)>"
    page = show(facts)

    page.locator("#table button[aria-expanded]").click()
    page.locator("#matrix").focus()
    page.keyboard.press("ArrowDown")
    page.locator('#tree [data-node="3"]').click()

    shown = names(page)
    assert {"<script>alert(2)</script>", *HOSTILE[1:]} <= set(shown)
    expect(page.locator("h1")).to_contain_text("<svg onload=alert(1)>")
    assert page.locator("img, b, [onload], [onerror]").count() == 0
    assert page.locator("script").count() == 2


# Runs that are unusual


def test_a_run_without_rounds_or_clients_is_shown(tmp_path, show):
    page = show(read_facts([GrowingRun(tmp_path / "run", ids=()).folder]))

    expect(page.locator("#summary")).to_contain_text("0 clients")
    expect(page.locator("#training")).to_be_hidden()


def test_what_is_gone_or_unknown_does_no_harm(show):
    facts = made_facts()
    run = facts["runs"][0]
    run["clients"]["leaf"][0] = None
    run["clients"]["last"]["accuracy"][0] = None
    run["series"]["nodes"]["accuracy"]["99"] = {
        "first": 3, "mean": [0.5, None, 0.6], "low": [0.4, None, 0.5], "high": [0.6, None, 0.7],
    }  # fmt: skip
    run["norms"]["99"] = run["norms"]["1"]
    run["decisions"].append(
        {**run["decisions"][0], "node": 99, "children": [98], "verdict": "merge"}
    )
    run["similarities"][0]["children"][0] = 98
    run["truth"], run["news"], run["clients"]["plain"] = None, [], None
    page = show(facts)

    expect(page.locator("#curves .legend")).to_contain_text("Node 99, merged back")
    expect(page.locator("#panel")).to_contain_text("node 99, which is gone")
    expect(page.locator("#truth")).to_be_hidden()
    assert column(page, 2)[0] == "–"


# Live


def test_the_live_page_gains_a_round_without_reload(tmp_path, visit):
    run = GrowingRun(tmp_path / "run")
    run.play(9)
    with serving(run.folder.path, port=0) as address:
        page = visit(address)
        expect(page.locator("#status")).to_have_text("live, round 9 of 30")
        page.evaluate("window.isTheSame = true")
        page.locator('#tree [data-node="2"]').click()
        page.locator("#search").fill("b1")
        page.locator("#panel summary").first.click()
        page.evaluate("scrollTo(0, 400)")

        run.play()

        expect(page.locator("#status")).to_have_text("live, round 10 of 30", timeout=20_000)
        assert page.evaluate("window.isTheSame")
        assert names(page) == ["b1"]
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        expect(page.locator("#panel details[open]")).to_have_count(1)
        assert page.evaluate("scrollY") == 400
        expect(page.locator("#selection")).to_have_text("Cluster 2, 3 clients")

        run.play()
        run.finish()

        expect(page.locator("#status")).to_have_text("ended after 11 rounds", timeout=20_000)


def test_the_live_page_waits_for_the_run_to_begin(tmp_path, visit):
    with serving(tmp_path / "run", port=0) as address:
        page = visit(address)
        expect(page.locator("h1")).to_have_text("Waiting for the run to begin")
        expect(page.locator("main")).to_be_hidden()

        GrowingRun(tmp_path / "run").play(8)

        expect(page.locator("h1")).to_have_text("runCFL", timeout=20_000)
        expect(page.locator("#tree .leaf")).to_have_count(2)


def test_the_live_page_says_when_its_server_is_gone(tmp_path, browser):
    run = GrowingRun(tmp_path / "run")
    run.play(2)
    with serving(run.folder.path, port=0) as address:
        visit = Visit(browser)
        page = visit.open(address)
    port = int(re.search(r":(\d+)/", address)[1])

    expect(page.locator("#status")).to_have_text("connection lost, trying again", timeout=20_000)
    with serving(run.folder.path, port=port):
        expect(page.locator("#status")).to_have_text("live, round 2 of 30", timeout=20_000)
    visit.context.close()


# To look at


def test_screenshots(show, run, tmp_path):
    folder = Path(os.environ.get("FEDBRANCH_SCREENSHOTS") or tmp_path / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    compared = made_facts()
    compared["comparison"] = made_comparison()
    many = made_facts(num_clients=300, num_leaves=30, rounds=100, split_every=3)
    phone = {"viewport": {"width": 360, "height": 740}}
    scenes = {
        "real-run": (read_facts([run.folder]), {}),
        "light": (compared, {}),
        "dark": (compared, {"color_scheme": "dark"}),
        "phone": (compared, phone),
        "thirty-clusters": (many, {}),
    }

    for name, (facts, settings) in scenes.items():
        show(facts, **settings).screenshot(path=folder / f"{name}.png", full_page=True)

    pictures = [(folder / f"{name}.png").read_bytes() for name in scenes]
    assert len(set(pictures)) == len(scenes)


# What only some runs have


def test_no_metric_name_breaks_the_page(show):
    facts = made_facts()
    (run,) = facts["runs"]
    names = ["constructor", "__proto__", "toString"]
    run["metrics"] = [{"name": name, "is_better": "lower", "is_log": False} for name in names]
    for values in (run["clients"]["last"], run["series"]["nodes"]):
        values.update(dict.fromkeys(names, values["accuracy"]))
    facts["comparison"] = made_comparison()
    facts["comparison"]["table"][0]["last"] = dict.fromkeys(names, 0.5)
    page = show(facts)

    expect(page.locator("#comparison-table tbody tr").nth(1)).to_contain_text("–")
    for name in names:
        page.locator("#metric").select_option(name)
        expect(page.locator("#curves-title")).to_contain_text(name)
        assert not page.locator("#log").is_checked()


@pytest.mark.parametrize("is_log", [True, False])
def test_the_largest_numbers_can_be_drawn(show, is_log):
    facts = made_facts()
    (run,) = facts["runs"]
    run["metrics"][0] = {**run["metrics"][0], "is_log": is_log}
    name = run["metrics"][0]["name"]
    for line in run["series"]["nodes"][name].values():
        line["mean"][-1] = line["high"][-1] = 1.7976931348623157e308
    page = show(facts)

    assert page.locator("#curves .tick").count() < 50


def test_a_folded_cell_names_the_clients_that_are_in_it(show):
    facts = made_facts(num_clients=300)
    similarity = facts["runs"][0]["similarities"][0]
    assert (similarity["num_clients"], similarity["size"]) == (300, 256)
    page = show(facts)
    matrix = page.locator("#matrix")

    matrix.press("ArrowRight")  # row 0, column 1: as the facts are folded, one client each

    ids = facts["runs"][0]["clients"]["ids"]
    first, second = (ids[similarity["order"][place]] for place in (0, 1))
    expect(page.locator("#pair")).to_contain_text(f"{first} (")
    expect(page.locator("#pair")).to_contain_text(f"and {second} (")
    expect(page.locator("#pair")).not_to_contain_text("…")


def test_a_run_without_metrics_shows_nothing_of_another(show):
    facts = made_facts()
    bare = made_facts()["runs"][0]
    bare |= {"name": "bare", "metrics": []}
    facts["runs"].append(bare)
    page = show(facts)
    page.locator("#run").select_option("1")

    expect(page.locator("#curves-table")).to_be_hidden()
    expect(page.locator("#log")).to_be_hidden()


def test_a_metric_of_training_is_not_called_held_out(show):
    facts = made_facts()
    facts["runs"][0]["measured_on"] = "training data"
    page = show(facts)

    expect(page.locator("#curves-title")).to_have_text(re.compile("on training data$"))
    expect(page.locator("#curves-words")).to_contain_text("on training data")


def test_a_value_is_told_with_its_own_round(show):
    facts = made_facts()
    (run,) = facts["runs"]
    line = run["series"]["nodes"]["accuracy"]["1"]
    line["mean"][0] = line["mean"][-1] = None
    rounds = run["series"]["rounds"][line["first"] :][: len(line["mean"])]
    page = show(facts)
    page.locator("#curves-table summary").click()

    row = page.locator("#curves-table tbody tr").nth(1)
    expect(row).to_contain_text(f"in round {rounds[1]}")
    expect(row).to_contain_text(f"in round {rounds[-2]}")


def test_the_summary_is_about_those_who_are_there(show):
    facts = made_facts()
    (run,) = facts["runs"]
    run["nodes"][0]["last"]["accuracy"] = 0.123
    page = show(facts)

    expect(page.locator("#summary")).to_contain_text("mean accuracy 0.123")
