"""The three messages of the key agreement: how they are written, read and verified.

Each message begins with its kind, run, epoch and roster. Cards and envelopes end with a signature
over all bytes before it; a confirmation ends with a MAC.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from fedbranch.errors import (
    DamagedMessage,
    NotInRoster,
    StaleEpoch,
    WrongRecipient,
    WrongRoster,
    WrongRun,
)
from fedbranch.privacy.identity import Identity, Roster, fingerprint_of, is_signed, shortened
from fedbranch.privacy.secret import KEY_BYTES, Secret
from fedbranch.privacy.wire import pack, unpack

__all__ = ["Card", "Confirmation", "Envelope", "check_heading", "confirmation_key", "heading"]

PROTOCOL = b"fedbranch key agreement 1"
SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)

DIGEST_BYTES = 32  # SHA-256, also of fingerprints and MACs
PUBLIC_BYTES = 32  # X25519 and Ed25519
SIGNATURE_BYTES = 64
SEALED_BYTES = PUBLIC_BYTES + KEY_BYTES + 16  # a fresh key of HPKE's, the secret, the tag
HEADING_SIZES = (len(PROTOCOL), None, None, 8, DIGEST_BYTES)


@dataclass(frozen=True)
class Card:
    """A member's fresh key for one agreement."""

    owner: str
    key: X25519PublicKey
    digest: bytes  # names the card in envelopes

    @staticmethod
    def write(identity: Identity, roster: Roster, key: X25519PublicKey) -> bytes:
        """Sign a key."""
        return _signed(b"card", identity, roster, key.public_bytes_raw())

    @classmethod
    def read(cls, blob: bytes, roster: Roster) -> Card:
        """Read a card and verify its owner.

        Raises
        ------
        AgreementFailed
            If it is not a card of a member of this roster.
        """
        owner, (key,) = _verified(b"card", blob, roster, [PUBLIC_BYTES])
        return cls(owner, X25519PublicKey.from_public_bytes(key), hashlib.sha256(blob).digest())


@dataclass(frozen=True)
class Envelope:
    """A secret that is sealed to the owner of a card."""

    sender: str
    recipient: str
    card_digest: bytes
    says_agreed: bool  # the sender knows that more than half of the roster has this secret
    sealed: bytes
    info: bytes  # all fields above but ``sealed``, which cannot be opened without them

    @staticmethod
    def write(
        identity: Identity, roster: Roster, card: Card, secret: Secret, *, says_agreed: bool
    ) -> bytes:
        """Seal and sign a secret."""
        address = (bytes.fromhex(card.owner), card.digest, bytes([says_agreed]))
        info = heading(b"envelope", roster, identity.public_bytes, *address)
        try:
            sealed = SUITE.encrypt(secret.key, card.key, info)
        except ValueError:
            raise DamagedMessage(
                f"the key on the card of {shortened(card.owner)} cannot be sealed to; "
                "ask for another card"
            ) from None
        return _signed(b"envelope", identity, roster, *address, sealed)

    @classmethod
    def read(cls, blob: bytes, roster: Roster) -> Envelope:
        """Read an envelope and verify its sender; it stays closed.

        Raises
        ------
        AgreementFailed
            If it is not an envelope from a member of this roster.
        """
        sizes = [DIGEST_BYTES, DIGEST_BYTES, 1, SEALED_BYTES]
        sender, (recipient, digest, agreed, sealed) = _verified(b"envelope", blob, roster, sizes)
        if agreed not in (b"\0", b"\1"):
            raise DamagedMessage(f"an envelope says {agreed!r} where 0 or 1 belongs")
        info = blob[: len(blob) - len(pack(sealed)) - len(pack(bytes(SIGNATURE_BYTES)))]
        return cls(sender, recipient.hex(), digest, agreed == b"\1", sealed, info)

    def secret_inside(self, key: X25519PrivateKey, roster: Roster) -> Secret:
        """Open the envelope.

        Raises
        ------
        WrongRecipient
            If it is sealed to another key.
        """
        try:
            opened = SUITE.decrypt(self.sealed, key, self.info)
        except (InvalidTag, ValueError):  # ValueError: HPKE's own key is none
            raise WrongRecipient(
                f"the envelope of {shortened(self.sender)} for {shortened(self.recipient)} is "
                "sealed to another key than that of this member's card"
            ) from None
        return Secret(opened, roster.run, roster.epoch)


@dataclass(frozen=True)
class Confirmation:
    """A member's proof that it has a secret; only members with the secret can check it."""

    member: str
    statement: bytes
    code: bytes

    @staticmethod
    def write(member: str, roster: Roster, secret: Secret) -> bytes:
        """Compute the MAC under a secret over a member's name."""
        statement = heading(b"confirmation", roster, bytes.fromhex(member))
        return statement + pack(_code(confirmation_key(secret), statement))

    @classmethod
    def read(cls, blob: bytes, roster: Roster) -> Confirmation:
        """Read a confirmation. :meth:`fits` checks it against a secret.

        Raises
        ------
        AgreementFailed
            If it is not a confirmation, or not from a member of this roster.
        """
        fields = unpack(blob, [*HEADING_SIZES, DIGEST_BYTES, DIGEST_BYTES])
        name, code = fields[-2:]
        member = name.hex()
        check_heading(b"confirmation", fields, roster, sender=member)
        return cls(member, blob[: -len(pack(code))], code)

    def fits(self, key: bytes) -> bool:
        """Return whether the member has the secret of this ``confirmation_key``."""
        return hmac.compare_digest(self.code, _code(key, self.statement))


def confirmation_key(secret: Secret) -> bytes:
    """Derive the key under which members confirm a secret."""
    return secret.derived("key agreement: confirmation")


def heading(kind: bytes, roster: Roster, *fields: bytes) -> bytes:
    """Return the beginning of a message: its kind, run, epoch and roster, and further fields."""
    place = (roster.run.encode(), roster.epoch.to_bytes(8), roster.digest)
    return pack(PROTOCOL, kind, *place, *fields)


def check_heading(kind: bytes, fields: list[bytes], roster: Roster, *, sender: str) -> None:
    """Refuse a message of another kind, sender, run, epoch or roster."""
    protocol, written_kind, run, epoch, digest = fields[: len(HEADING_SIZES)]
    if (protocol, written_kind) != (PROTOCOL, kind):
        raise DamagedMessage(
            f"a message begins with {protocol!r}, {written_kind[:20]!r}; "
            f"expected {PROTOCOL!r}, {kind!r}"
        )
    what = f"the {kind.decode()} of {shortened(sender)}"
    if sender not in roster.members:
        raise NotInRoster(
            f"{what} does not count: that member is not in {roster}; it never was, or it was removed"
        )
    if run != roster.run.encode():
        raise WrongRun(f"{what} is for run {run!r}; this is run {roster.run!r}")
    written_epoch = int.from_bytes(epoch)
    if written_epoch != roster.epoch:
        raise StaleEpoch(
            f"{what} is for epoch {written_epoch}, this member is in epoch {roster.epoch}; "
            "the member in the earlier epoch needs the present roster"
        )
    if digest != roster.digest:
        raise WrongRoster(
            f"{what} is for a roster {digest.hex()[:16]}; this member has {roster}: "
            "compare the two lists"
        )


def _signed(kind: bytes, identity: Identity, roster: Roster, *fields: bytes) -> bytes:
    statement = heading(kind, roster, identity.public_bytes, *fields)
    return statement + pack(identity.sign(statement))


def _verified(
    kind: bytes, blob: bytes, roster: Roster, sizes: list[int]
) -> tuple[str, list[bytes]]:
    """Return the sender and the fields of a signed message after verifying it."""
    fields = unpack(blob, [*HEADING_SIZES, PUBLIC_BYTES, *sizes, SIGNATURE_BYTES])
    public_bytes, *content, signature = fields[len(HEADING_SIZES) :]
    sender = fingerprint_of(public_bytes)
    is_member = sender in roster.members
    # First, so that no field of a forged message is used to explain why it is refused.
    if is_member and not is_signed(blob[: -len(pack(signature))], signature, public_bytes):
        raise DamagedMessage(
            f"the {kind.decode()} of {shortened(sender)} is not what that member signed: it was "
            "changed on the way, or forged"
        )
    check_heading(kind, fields, roster, sender=sender)
    return sender, content


def _code(key: bytes, statement: bytes) -> bytes:
    return hmac.digest(key, statement, "sha256")
