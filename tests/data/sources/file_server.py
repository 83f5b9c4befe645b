"""A server of small published files on 127.0.0.1, which can fail as public ones do."""

import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from data.sources.small_sets import sha256
from fedbranch.data.sources import Download


class FileServer:
    """Serve files by their paths; any other path is a 404.

    Attributes
    ----------
    files
        Path without its first slash -> content. May be changed at any time.
    cut
        Paths of which only half arrives, before the connection is closed.
    stalled
        Paths of which only half arrives, before nothing happens until the server is stopped.
    asked
        The paths that were asked for, in that order.
    """

    def __init__(self, files):
        self.files = dict(files)
        self.cut = set()
        self.stalled = set()
        self.asked = []
        self.sent_half = threading.Event()
        self._stop = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.removeprefix("/")
                outer.asked.append(path)
                content = outer.files.get(path)
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                is_half = path in outer.cut | outer.stalled
                self.wfile.write(content[: len(content) // 2] if is_half else content)
                self.wfile.flush()
                if path in outer.stalled:
                    outer.sent_half.set()
                    outer._stop.wait(60)

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def downloads_of(files, *mirrors):
    """Describe files that are offered as they are, with their hashes."""
    return tuple(
        Download(name=name, sha256=sha256(content), urls=tuple(mirror + name for mirror in mirrors))
        for name, content in files.items()
    )


def archive_of(files, folder="cifar-10-batches-bin"):
    """Pack files into a tar.gz, beside others that nothing asks for."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in {"readme.html": b"<html>", **files}.items():
            about = tarfile.TarInfo(f"{folder}/{name}")
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return packed.getvalue()


def archive_download(content, names, *urls, folder="cifar-10-batches-bin"):
    return Download(
        name="cifar-10-binary.tar.gz",
        sha256=sha256(content),
        urls=urls,
        members={f"{folder}/{name}": name for name in names},
    )
