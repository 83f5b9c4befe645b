"""Identities of members, and the roster of a federation, which people settle without the server."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fedbranch.errors import NotInRoster
from fedbranch.privacy.wire import pack

__all__ = ["Identity", "Roster", "fingerprint_of", "is_signed", "shortened"]

MAX_RUN_BYTES = 200
FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class Identity:
    """A member's long-lived key (Ed25519). It signs; nothing is ever encrypted to it.

    Use it for this purpose only, and keep its file as you keep an SSH key.

    Examples
    --------
    >>> identity = Identity.new()
    >>> Identity.from_pem(identity.to_pem()).fingerprint == identity.fingerprint
    True
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_bytes: bytes = key.public_key().public_bytes_raw()
        self.fingerprint: str = fingerprint_of(self.public_bytes)

    @classmethod
    def new(cls) -> Identity:
        """Draw a fresh identity from the operating system."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes, password: bytes | None = None) -> Identity:
        """Read an identity, as :meth:`to_pem` or ``openssl genpkey -algorithm ed25519`` wrote it.

        Raises
        ------
        ValueError
            If it is no Ed25519 key, or the password is wrong or missing.
        """
        try:
            key = load_pem_private_key(pem, password)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ValueError(f"the identity cannot be read: {error}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"the identity is a {type(key).__name__}; it must be an Ed25519 key")
        return cls(key)

    def to_pem(self, password: bytes | None = None) -> bytes:
        """Write the private key as PEM, encrypted if there is a password."""
        protection = BestAvailableEncryption(password) if password else NoEncryption()
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection)

    def sign(self, statement: bytes) -> bytes:
        """Sign a statement, which must state its kind and its purpose."""
        return self._key.sign(statement)

    def derived(self, purpose: str) -> bytes:
        """Derive a key that only this identity knows, for data that it keeps for itself."""
        info = pack(b"fedbranch identity 1", purpose.encode())
        return HKDF(SHA256(), 32, salt=None, info=info).derive(self._key.private_bytes_raw())

    def __repr__(self) -> str:
        return f"<Identity {shortened(self.fingerprint)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an identity is not pickled; keep it with to_pem()")


@dataclass(frozen=True)
class Roster:
    """The members of a run. Members get it from each other or from a person, not the server.

    Attributes
    ----------
    run
        A name that no other run has; at most 200 bytes.
    members
        Fingerprints of the identities of all members, also of those that come late.
    epoch
        Each change of the members is a new epoch, with a secret of its own.

    Examples
    --------
    >>> roster = Roster("demo", frozenset({"a" * 64, "b" * 64, "c" * 64}))
    >>> roster.quorum
    2
    >>> roster.without("b" * 64)
    <Roster of run 'demo', epoch 2: 2 members, 14fa45457c30e6a9>
    """

    run: str
    members: Collection[str]
    epoch: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.run, str):
            raise TypeError(f"run is {self.run!r}; it must be the name of the run")
        if isinstance(self.members, str) or not isinstance(self.members, Collection):
            raise TypeError(f"members is {self.members!r}; it must be a list of fingerprints")
        object.__setattr__(self, "members", frozenset(self.members))
        if not 1 <= len(self.run.encode()) <= MAX_RUN_BYTES:
            raise ValueError(
                f"the run's name has {len(self.run.encode())} bytes; it must have 1 to {MAX_RUN_BYTES}"
            )
        if type(self.epoch) is not int or not 1 <= self.epoch < 2**64:
            raise ValueError(f"epoch is {self.epoch!r}; it must be a whole number from 1 on")
        if not self.members:
            raise ValueError("the roster has no members; list their fingerprints")
        for member in self.members:
            if not isinstance(member, str) or not FINGERPRINT.fullmatch(member):
                raise ValueError(
                    f"{member!r} is no fingerprint; it must be the 64 digits of "
                    "Identity.fingerprint"
                )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over run, epoch and members."""
        members = pack(*(bytes.fromhex(member) for member in sorted(self.members)))
        fields = (b"fedbranch roster 1", self.run.encode(), self.epoch.to_bytes(8), members)
        return hashlib.sha256(pack(*fields)).digest()

    @property
    def quorum(self) -> int:
        """More than half of the members: two such groups always have a member in common."""
        return len(self.members) // 2 + 1

    def leader(self, present: Iterable[str]) -> str:
        """Return the member that draws the secret: the lowest fingerprint of those present.

        Raises
        ------
        NotInRoster
            If none of them is a member.
        """
        members = set(present) & set(self.members)
        if not members:
            raise NotInRoster("no member of the roster is present; wait for their cards")
        return min(members)

    def without(self, *removed: str) -> Roster:
        """Make the roster of the next epoch, without these members."""
        unknown = set(removed) - set(self.members)
        if unknown:
            raise ValueError(f"{sorted(unknown)} cannot be removed; they are not in the roster")
        return Roster(self.run, set(self.members) - set(removed), self.epoch + 1)

    def joined_by(self, *added: str) -> Roster:
        """Make the roster of the next epoch, with these members added."""
        return Roster(self.run, {*self.members, *added}, self.epoch + 1)

    def __repr__(self) -> str:
        return (
            f"<Roster of run {self.run!r}, epoch {self.epoch}: {len(self.members)} members, "
            f"{self.digest.hex()[:16]}>"
        )


def fingerprint_of(public_bytes: bytes) -> str:
    """Name a public key by its SHA-256, as 64 digits.

    Examples
    --------
    >>> fingerprint_of(bytes(32))[:16]
    'a99b9f8429437653'
    """
    return hashlib.sha256(pack(b"fedbranch identity 1", public_bytes)).hexdigest()


def is_signed(statement: bytes, signature: bytes, public_bytes: bytes) -> bool:
    """Return whether this key has signed this statement."""
    try:
        Ed25519PublicKey.from_public_bytes(public_bytes).verify(signature, statement)
    except (InvalidSignature, ValueError):  # ValueError: not the bytes of a key
        return False
    return True


def shortened(fingerprint: str) -> str:
    """Return the part of a fingerprint that is shown to people."""
    return fingerprint[:16]
