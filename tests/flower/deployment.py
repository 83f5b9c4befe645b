"""A Flower deployment on loopback: SuperLink with TLS, SuperNodes with keys, one process each.

Everything lives in one folder; every process that is started here is ended here, by its id.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

BIN = Path(sys.executable).parent


class Deployment:
    """A SuperLink, its SuperNodes and the runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.superlink: subprocess.Popen[bytes] | None = None
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}  # partition -> SuperNode
        self.keys: dict[int, ec.EllipticCurvePrivateKey] = {}
        make_certificates(folder)
        (folder / "logs").mkdir()
        home = folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "test"\n[superlink.test]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{folder / "ca.crt"}"\n'
        )

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in [*self.nodes.values(), self.superlink]:
            if process is not None:
                end(process)

    # Processes

    def start_superlink(self) -> None:
        self.superlink = self._spawn(
            "superlink",
            "home",
            "flower-superlink",
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--ssl-ca-certfile", self.folder / "ca.crt"),
            *("--ssl-certfile", self.folder / "server.crt"),
            *("--ssl-keyfile", self.folder / "server.key"),
            "--enable-supernode-auth",
            *("--database", self.folder / "state.db"),
            "--disable-runtime-dependency-installation",
        )
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        url = f"https://127.0.0.1:{self.port}/health"

        def is_healthy() -> bool:
            with contextlib.suppress(OSError):
                return urllib.request.urlopen(url, context=context, timeout=5).status == 200
            return False

        wait_for(is_healthy, 60, "the SuperLink to start")

    def register(self, partition: int) -> None:
        """Make a key pair for a SuperNode and tell the SuperLink."""
        key = self.keys[partition] = ec.generate_private_key(ec.SECP384R1())
        private, public = self.folder / f"node-{partition}", self.folder / f"node-{partition}.pub"
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        private.chmod(0o600)
        public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
        self.flwr("supernode", "register", str(public), "--name", f"hospital-{partition}")

    def public_key(self, partition: int) -> bytes:
        """The key as the server app will see it."""
        key = self.keys[partition].public_key()
        return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def start_node(self, partition: int, num_partitions: int) -> None:
        (self.folder / "logs" / f"node-{partition}.log").unlink(missing_ok=True)
        self.nodes[partition] = self._spawn(
            f"node-{partition}",
            f"home-{partition}",  # each unpacks the app in a home of its own
            "flower-supernode",
            *("--superlink", f"127.0.0.1:{self.port}"),
            *("--root-certificates", self.folder / "ca.crt"),
            *("--auth-supernode-private-key", self.folder / f"node-{partition}"),
            *("--port", str(free_port())),
            *("--node-config", f"partition-id={partition} num-partitions={num_partitions}"),
        )

    def kill_node(self, partition: int) -> None:
        """End a SuperNode and what it started as a power cut would."""
        process = self.nodes.pop(partition)
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def is_connected(self, partition: int) -> bool:
        """Return whether a SuperNode has been let in since it was started."""
        return "SuperNode ID:" in (self.folder / "logs" / f"node-{partition}.log").read_text()

    def start_node_until_it_is_let_in(self, partition: int, num_partitions: int) -> None:
        """Start a SuperNode until it stays: it ends while its old process counts as online."""
        until = time.monotonic() + 150
        self.start_node(partition, num_partitions)
        while not self.is_connected(partition):
            if self.nodes[partition].poll() is not None:
                end(self.nodes[partition])
                time.sleep(3)
                self.start_node(partition, num_partitions)
            if time.monotonic() > until:
                raise TimeoutError(f"the SuperNode of partition {partition} was never let in")
            time.sleep(0.3)

    def kill_server_app(self) -> None:
        assert self.superlink is not None
        pids = descendants(self.superlink.pid, running="flwr-serverapp")
        assert len(pids) == 1, pids
        os.kill(pids[0], signal.SIGKILL)

    # Runs

    def run(self, app: Path, **config: object) -> str:
        """Submit an app; give the id of its run."""
        settings = " ".join(
            f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in config.items()
        )
        return str(self.flwr("run", str(app), "test", "--run-config", settings)["run-id"])

    def status(self, run_id: str) -> str:
        return str(self.flwr("list", "--run-id", run_id)["runs"][0]["status"])

    def flwr(self, *arguments: str) -> dict[str, object]:
        done = subprocess.run(
            [BIN / "flwr", *arguments, "--format", "json"],
            env=environment_for(self.folder),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"flwr {arguments}: {done.stdout}{done.stderr}"
        return json.loads(done.stdout)

    def logs(self) -> str:
        """The ends of all logs, for a failed test."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted((self.folder / "logs").iterdir())
        )

    def _spawn(self, name: str, home: str, program: str, *arguments: object) -> subprocess.Popen:
        (self.folder / home).mkdir(exist_ok=True)
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [BIN / program, *map(str, arguments)],
                env=environment_for(self.folder, home),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


def environment_for(folder: Path, home: str = "home") -> dict[str, str]:
    """What Flower's programs are to find, so that they stay in a folder and on this machine."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLWR_", "PYTEST"))}
    return {
        **kept,
        "HOME": str(folder),
        "FLWR_HOME": str(folder / home),
        "PATH": f"{BIN}{os.pathsep}{kept.get('PATH', '')}",  # Flower's programs start others
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
    }


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process of ours and everything that it started."""
    started = descendants(process.pid)
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int, *, running: str | None = None) -> list[int]:
    """Return the ids of the processes below a process: all, or those that run a program."""
    children: dict[int, list[int]] = {}
    programs: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
                words = (entry / "cmdline").read_bytes().split(b"\0")[:3]
                programs[int(entry.name)] = [Path(os.fsdecode(word)).name for word in words]
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return [one for one in found if running is None or running in programs[one]]


def running_with(word: str) -> list[int]:
    """Return the ids of the processes with a word in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and word in os.fsdecode((entry / "cmdline").read_bytes()):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def wait_for(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {limit_s} s for {what}")
        time.sleep(0.3)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_certificates(folder: Path) -> None:
    """Make a certificate authority, and a certificate for this machine that it signed."""
    now = datetime.datetime.now(datetime.UTC)

    def builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, *, is_ca: bool):
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (subject, issuer)]
        return (
            x509.CertificateBuilder()
            .subject_name(names[0])
            .issuer_name(names[1])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )

    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = builder("test authority", "test authority", ca_key, is_ca=True).sign(
        ca_key, hashes.SHA256()
    )
    addresses = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    certificate = (
        builder("localhost", "test authority", key, is_ca=False)
        .add_extension(addresses, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    (folder / "ca.crt").write_bytes(ca.public_bytes(Encoding.PEM))
    (folder / "server.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "server.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
