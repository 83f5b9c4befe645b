"""The page of a run that goes on: a small server for this machine's own browsers.

It listens on 127.0.0.1 only, and answers two addresses: ``/`` is the page, ``/facts.json`` the
facts that it shows. They are read again when the folder has changed. No other file of the folder
or the disk can be requested. A web site that points its own name at 127.0.0.1 is refused by that
name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import signal
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import fedbranch
from fedbranch.errors import FedbranchError
from fedbranch.report.facts.facts import SCHEMA, read_facts
from fedbranch.report.page.page import page_of
from fedbranch.runs import RunFolder
from fedbranch.types import JSON

__all__ = ["own_names", "serving", "watch"]

ADDRESS = "127.0.0.1"
PORTS_TRIED = 20  # from the given one on, if it is taken
WRITTEN = ("run.json", "history.jsonl", "names.json", "summary.json", "state/state.json")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself has the rest
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def watch(path: Path, *, port: int, opens_browser: bool, on_ready: Callable[[str], None]) -> None:
    """Serve the page of a run until SIGINT or SIGTERM; to be called from the main thread.

    Parameters
    ----------
    path
        The run folder. It may be empty or missing: the page waits for the run.
    port
        Where to listen. If it is taken, the next free one is used; 0 lets the system choose.
    opens_browser
        Whether to open the page in a browser.
    on_ready
        Called with the page's address.

    Raises
    ------
    ValueError
        If no port has that number.
    OSError
        If that port and those after it are taken.
    """
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # in the background Ctrl-C may not be for us
                signal.signal(number, stop)
        with serving(path, port=port) as address:
            on_ready(address)
            if opens_browser:
                webbrowser.open(address)
            stopped.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def serving(path: Path, *, port: int) -> Iterator[str]:
    """Serve the page of a run inside a ``with`` block; see :func:`watch` for the parameters.

    Yields
    ------
    str
        The page's address.
    """
    server = _listening(path, port)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield f"http://{ADDRESS}:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _listening(path: Path, port: int) -> _Server:
    if not 0 <= port <= 65535:
        raise ValueError(f"there is no port {port}; give one from 1024 to 65535, or 0 for any")
    last = min(port + PORTS_TRIED, 65536) - 1 if port else 0
    for candidate in range(port, last + 1):
        try:
            return _Server(path, candidate)
        except PermissionError as error:
            raise PermissionError(
                f"port {candidate} needs special rights; give one from 1024 on, or 0 for any"
            ) from error
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        f"the ports {port} to {last} of {ADDRESS} are all taken; give another, or 0 for any"
    )


class _Snapshot(NamedTuple):
    facts: JSON
    body: bytes  # the same as JSON
    tag: str  # of the body, for ETag


class _Folder:
    """A run folder that grows, and what was read of it last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # one request reads, the others wait for it
        self._marks: object = None  # of the files as they were before they were read
        self._snapshot: _Snapshot | None = None

    def read(self) -> _Snapshot:
        """Return the present facts; those read last, if nothing was written since."""
        with self._lock:
            marks = self._marks_now()
            if self._snapshot is None or marks != self._marks:
                try:
                    self._snapshot = _snapshot(self._facts_now())
                    self._marks = marks
                except (FedbranchError, OSError) as error:
                    # A file that is being replaced was read several times already. The next
                    # request may find it whole, so the marks stay as they are.
                    if self._snapshot is None or not self._snapshot.facts["runs"]:
                        self._snapshot = _snapshot(_waiting(f"It cannot be read yet: {error}."))
            return self._snapshot

    def _marks_now(self) -> list[tuple[str, int, int]]:
        """Return the names, sizes and times of the files that a run changes."""
        folders = [self._path, *sorted((self._path / "baselines").glob("*"))]
        marks = []
        for file in (folder / name for folder in folders for name in WRITTEN):
            try:
                about = file.stat()
            except OSError:
                continue
            marks.append((str(file), about.st_size, about.st_mtime_ns))
        return marks

    def _facts_now(self) -> JSON:
        if not (self._path / "run.json").exists():
            return _waiting("Nothing has been written into its folder yet.")
        return read_facts([RunFolder(self._path)])


def _snapshot(facts: JSON) -> _Snapshot:
    body = json.dumps(facts, separators=(",", ":"), allow_nan=False).encode()
    return _Snapshot(facts, body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _waiting(words: str) -> JSON:
    """Return facts without a run, which the page shows as waiting."""
    return {
        "schema": SCHEMA,
        "fedbranch": fedbranch.__version__,
        "runs": [],
        "comparison": None,
        "waiting": f"{words} This page goes on by itself.",
    }


def own_names(port: int) -> set[str]:
    """Return the values of the Host header that browsers send; they leave out port 80."""
    names = {ADDRESS, "localhost"}
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a connection that a browser keeps open does not delay the end
    allow_reuse_address = sys.platform != "win32"  # on Windows it would share a port that is taken

    def __init__(self, path: Path, port: int) -> None:
        self.folder = _Folder(path)
        super().__init__((ADDRESS, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that leave before the answer."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "fedbranch"
    sys_version = ""
    timeout = 10  # seconds for a request to arrive

    def do_GET(self) -> None:
        """Answer with the page or the facts."""
        if self.headers.get("Host") not in own_names(self.server.server_port):
            self._refuse(HTTPStatus.FORBIDDEN, "this page is for this machine only")
        elif self.path == "/":
            page = page_of(self.server.folder.read().facts, live=True)
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.encode(errors="replace"))
        elif self.path == "/facts.json":
            _, body, tag = self.server.folder.read()
            if self.headers.get("If-None-Match") == tag:
                self._send(HTTPStatus.NOT_MODIFIED, None, b"", tag)
            else:
                self._send(HTTPStatus.OK, "application/json", body, tag)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "only / and /facts.json are here")

    do_HEAD = do_GET  # noqa: N815 - the base class calls it so

    def _refuse_method(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method  # noqa: N815 - as above

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{words}\n".encode())

    def _send(
        self, status: HTTPStatus, kind: str | None, body: bytes, tag: str | None = None
    ) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if kind is not None:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        if tag is not None:
            self.send_header("ETag", tag)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class has it so
        """Print nothing about requests."""
