"""The server of the live page: what it answers, what it refuses, and how it ends."""

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from fedbranch.report.page.live import own_names, serving
from report.growing_run import GrowingRun


def ask(address, path="/facts.json", method="GET", **headers):
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


@pytest.fixture
def run(tmp_path):
    run = GrowingRun(tmp_path / "run")
    run.play(3)
    return run


@pytest.fixture
def address(run):
    with serving(run.folder.path, port=0) as address:
        yield address


def rounds_done(address):
    return json.loads(ask(address)[1])["runs"][0]["rounds_done"]


def test_the_page_and_its_facts_are_served(address):
    page, html = ask(address, "/")
    facts, body = ask(address)

    assert page.status == facts.status == 200
    assert page.getheader("Content-Type") == "text/html; charset=utf-8"
    assert b'data-live="true"' in html
    assert json.loads(body)["runs"][0]["rounds_done"] == 3


def test_a_new_round_is_in_the_facts(address, run):
    assert rounds_done(address) == 3

    run.play()

    assert rounds_done(address) == 4


def test_facts_that_have_not_changed_are_not_sent_again(address, run):
    first, _ = ask(address)
    tag = first.getheader("ETag")

    again, body = ask(address, If_None_Match=tag)
    run.play()
    changed, _ = ask(address, If_None_Match=tag)

    assert (again.status, body) == (304, b"")
    assert changed.status == 200
    assert changed.getheader("ETag") != tag


def test_facts_are_read_again_only_after_a_change(run, monkeypatch):
    from fedbranch.report.page import live

    reads = []

    def counting(folders):
        reads.append(folders)
        return original(folders)

    original = live.read_facts
    monkeypatch.setattr(live, "read_facts", counting)
    with serving(run.folder.path, port=0) as address:
        for _ in range(3):
            ask(address)
        run.play()
        ask(address)

    assert len(reads) == 2


@pytest.mark.parametrize(
    "path",
    ["/run.json", "/history.jsonl", "/state/state.json", "/../run.json", "/%2e%2e/run.json",
     "/facts.json?x", "/facts.json/", "/favicon.ico"],
)  # fmt: skip
def test_nothing_else_is_served(address, path):
    answer, body = ask(address, path)

    assert answer.status == 404
    assert b"only / and /facts.json" in body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", ""])
def test_other_names_for_this_machine_are_refused(address, host):
    for path in ("/", "/facts.json"):
        answer, body = ask(address, path, Host=host)

        assert answer.status == 403
        assert b"accuracy" not in body


def test_localhost_is_a_name_for_this_machine(address):
    assert ask(address, Host=f"localhost:{urlsplit(address).port}")[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_reading_is_possible(address, method):
    answer, _ = ask(address, method=method)

    assert answer.status == 405
    assert answer.getheader("Allow") == "GET, HEAD"


def test_head_gives_the_headers_only(address):
    answer, body = ask(address, "/", method="HEAD")

    assert answer.status == 200
    assert int(answer.getheader("Content-Length")) > 1000
    assert body == b""


def test_only_this_machine_can_connect(address):
    assert address.startswith("http://127.0.0.1:")
    other = "127.0.0.2"  # the same machine, by another address than the one it listens on

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, urlsplit(address).port), timeout=5)


def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path):
    with serving(tmp_path / "run", port=0) as address:
        before = json.loads(ask(address)[1])
        GrowingRun(tmp_path / "run").play(2)

        assert before["runs"] == []
        assert "Nothing has been written" in before["waiting"]
        assert rounds_done(address) == 2


def test_a_run_without_a_round_is_shown(tmp_path):
    GrowingRun(tmp_path / "run")

    with serving(tmp_path / "run", port=0) as address:
        assert rounds_done(address) == 0
        assert ask(address, "/")[0].status == 200


def test_damage_leaves_what_was_shown_and_passes(address, run):
    assert rounds_done(address) == 3
    history = run.folder.path / "history.jsonl"
    whole = history.read_bytes()

    history.write_bytes(whole.replace(b"a0", b"a9", 1))
    during = rounds_done(address)
    history.write_bytes(whole)
    run.play()

    assert during == 3
    assert rounds_done(address) == 4


def test_damage_from_the_beginning_is_told(tmp_path):
    run = GrowingRun(tmp_path / "run")
    run.play()
    (tmp_path / "run" / "history.jsonl").write_bytes(b"{}\n")

    with serving(tmp_path / "run", port=0) as address:
        facts = json.loads(ask(address)[1])

    assert facts["runs"] == []
    assert "history.jsonl" in facts["waiting"]


def test_a_port_that_is_taken_is_passed_over(address, run):
    taken = urlsplit(address).port

    with serving(run.folder.path, port=taken) as other:
        assert taken < urlsplit(other).port < taken + 20
        assert rounds_done(other) == 3


def test_a_port_that_cannot_be_is_refused(run):
    with pytest.raises(ValueError, match="there is no port 70000; give one from 1024"):
        serving(run.folder.path, port=70000).__enter__()


WATCH = """
import sys
from pathlib import Path
from fedbranch.report.page.live import watch
watch(Path(sys.argv[1]), port=0, opens_browser=False, on_ready=lambda a: print(a, flush=True))
print("stopped", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_cleanly(run, number):
    with subprocess.Popen(
        [sys.executable, "-c", WATCH, str(run.folder.path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        address = process.stdout.readline().strip()
        assert rounds_done(address) == 3

        process.send_signal(number)
        rest, errors = process.communicate(timeout=20)

    assert (process.returncode, rest, errors) == (0, "stopped\n", "")
    with pytest.raises(ConnectionRefusedError):
        ask(address)


def test_a_folder_that_goes_away_is_no_error(address, run):
    assert rounds_done(address) == 3

    shutil.rmtree(run.folder.path)

    assert json.loads(ask(address)[1])["runs"] == []


def test_browsers_leave_out_the_port_80():
    assert "127.0.0.1" in own_names(80)
    assert own_names(8000) == {"127.0.0.1:8000", "localhost:8000"}
