"""The secret that all members of a federation share and the server does not know."""

from __future__ import annotations

import secrets
import struct
from typing import NoReturn

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

__all__ = ["Secret"]

KEY_BYTES = 32
PROTOCOL = b"fedbranch privacy 1"


class Secret:
    """A key for one epoch of one run; keys, streams and seeds are derived from it.

    Parameters
    ----------
    key
        32 random bytes. Never printed, logged, copied into a dictionary or pickled.
    run
        The name of the run.
    epoch
        The number of the key in its run. A removed member knows none of the later keys.

    Examples
    --------
    >>> secret = Secret(bytes(32), run="demo", epoch=1)
    >>> secret
    <Secret of run 'demo', epoch 1: 59b03ffd>
    >>> secret.stream("an example", 4).hex()
    '31d11e74'
    """

    # No dataclass: asdict() and vars() of an object with a secret would show the key.
    __slots__ = ("_epoch", "_key", "_run")

    def __init__(self, key: bytes, run: str, epoch: int = 1) -> None:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            size = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"
            raise ValueError(f"the key is {size}; it must be {KEY_BYTES} bytes")
        if not isinstance(run, str) or not run:
            raise ValueError(f"run is {run!r}; it must be a name that no other run has")
        if type(epoch) is not int or not 1 <= epoch < 2**64:
            raise ValueError(f"epoch is {epoch!r}; it must be a whole number from 1 on")
        self._key, self._run, self._epoch = key, run, epoch

    @property
    def key(self) -> bytes:
        """32 random bytes."""
        return self._key

    @property
    def run(self) -> str:
        """The name of the run."""
        return self._run

    @property
    def epoch(self) -> int:
        """The number of the key in its run."""
        return self._epoch

    @classmethod
    def new(cls, run: str, epoch: int = 1) -> Secret:
        """Draw a fresh secret from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES), run, epoch)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        # In constant time, so that timing reveals nothing.
        is_key = secrets.compare_digest(self.key, other.key)
        return is_key and (self.run, self.epoch) == (other.run, other.epoch)

    def __hash__(self) -> int:
        return hash((self.run, self.epoch, self.fingerprint))

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, _: object) -> Secret:
        return self

    def derived(self, purpose: str) -> bytes:
        """Derive the key for a purpose; it reveals nothing about the keys for other purposes."""
        info = b"".join(
            struct.pack(">Q", len(part)) + part
            for part in (PROTOCOL, self.run.encode(), str(self.epoch).encode(), purpose.encode())
        )
        return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(self.key)

    def stream(self, purpose: str, num_bytes: int) -> bytes:
        """Return random bytes for a purpose, the same for all members."""
        nonce = bytes(16)  # each purpose has a key of its own, which is used once
        cipher = Cipher(algorithms.ChaCha20(self.derived(purpose), nonce), mode=None)
        return cipher.encryptor().update(bytes(num_bytes))

    def seed(self, purpose: str) -> int:
        """Return a seed for a generator that must be the same for all members."""
        return int.from_bytes(self.stream(purpose, 8)) >> 1

    @property
    def fingerprint(self) -> str:
        """A short name that people can compare. It reveals nothing about the key."""
        return self.stream("fingerprint", 4).hex()

    def __repr__(self) -> str:
        return f"<Secret of run {self.run!r}, epoch {self.epoch}: {self.fingerprint}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled; pass it on by the key agreement only")
