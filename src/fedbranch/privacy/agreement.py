"""How members agree on a secret through a server that they do not trust.

People first settle the roster without the server: the fingerprints of all members' identities,
the name of the run, and an epoch. The server may read, keep, drop, repeat, change and invent
messages. It cannot learn the secret, bring a stranger into the agreement, or make two members
use different secrets. It can keep them from agreeing at all.

The messages, each bound to run, epoch and roster:

1. *Card*, member to all. A fresh X25519 key, signed by the member's identity.
2. *Envelope*, a member that has the secret to the owner of a card. The secret, sealed to the
   card's key (HPKE), with the names of sender and card; signed. The first envelope comes from
   the leader, which draws the secret. The leader is the member with the lowest fingerprint
   among itself and the cards that it is shown.
3. *Confirmation*, member to all. "I have this secret": a MAC under it over the member's name.
   It travels with the next message, so card and envelope are the only round trip.

The server chooses the cards that a leader is shown, so safety does not depend on which member
leads. It follows from two rules:

- **A member takes one secret per epoch.** It remembers the first secret that it draws or opens
  and refuses any other (``SplitView``).
- **A secret is used when more than half of the roster has it**: ``Member.secret`` raises
  ``NotConfirmed`` until the member has checked confirmations of more than half of the roster,
  its own included.

Two groups of more than half have a member in common, and that member took one secret. So no
two secrets are ever in use in one epoch, whatever the server shows. A member that was shown
another secret uses none.

- *A leader that vanishes* is replaced by any member. A member that has opened the leader's
  envelope passes the same secret on; any other draws a new one. By the two rules, at most one
  of the secrets is ever used.
- *Late members*, of the same roster, send a card, and any member answers with an envelope. If
  the sender has seen enough confirmations, the envelope says so. The receiver then needs no
  confirmations of its own. It may also replace another secret that it took, since that one can
  never come into use.
- *Removed and added members*: the next epoch has another roster and a fresh secret. Messages of
  other epochs are refused.

Not protected:

- A member that reveals the secret reveals it to the server.
- A member that never hears of a new roster goes on with the old one.
- A member that forgets which secret it took (its state was not kept, see
  :meth:`Member.to_bytes`) may take another. Both stay secret, but its updates no longer fit
  those of the others.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedbranch.errors import (
    DamagedMessage,
    NotConfirmed,
    NotInRoster,
    NotLeader,
    ReplayedEnvelope,
    SplitView,
    SwappedCard,
    WrongRecipient,
)
from fedbranch.privacy.identity import Identity, Roster, shortened
from fedbranch.privacy.secret import Secret
from fedbranch.privacy.statements import (
    HEADING_SIZES,
    Card,
    Confirmation,
    Envelope,
    check_heading,
    confirmation_key,
    heading,
)
from fedbranch.privacy.wire import pack, unpack

__all__ = ["Member"]

NONCE_BYTES = 12
FINGERPRINT_BYTES = 32


class Member:
    """One member of a federation in one epoch: the secret it has taken, and its confirmations.

    It makes and reads messages as bytes. The caller carries them.

    Parameters
    ----------
    identity
        The member's own.
    roster
        The members of the run, as people settled them without the server.

    Raises
    ------
    NotInRoster
        If the identity is not on the roster.

    Examples
    --------
    >>> anna, ben = sorted((Identity.new(), Identity.new()), key=lambda one: one.fingerprint)
    >>> roster = Roster("demo", {anna.fingerprint, ben.fingerprint})
    >>> leader, other = Member(anna, roster), Member(ben, roster)
    >>> envelopes = leader.seal([other.card()])
    >>> other.open(envelopes[ben.fingerprint])
    >>> leader.check([other.confirmation()])
    >>> other.check([leader.confirmation()])
    >>> leader.secret == other.secret
    True
    """

    def __init__(self, identity: Identity, roster: Roster) -> None:
        if identity.fingerprint not in roster.members:
            raise NotInRoster(
                f"this identity, {identity.fingerprint}, is not in {roster}; "
                "it was removed, or this is the roster of another federation"
            )
        self.identity = identity
        self.roster = roster
        self._card_key = X25519PrivateKey.generate()
        self._taken: Secret | None = None
        self._confirmed: set[str] = set()  # fingerprints of members that have the secret
        self._was_told = False  # by another member, that more than half have the secret

    @property
    def fingerprint(self) -> str:
        """The identity's fingerprint."""
        return self.identity.fingerprint

    @property
    def has_taken_a_secret(self) -> bool:
        """True once the member has drawn a secret or opened an envelope; it then takes no other."""
        return self._taken is not None

    @property
    def has_agreed(self) -> bool:
        """True once more than half of the roster is known to have the same secret."""
        return self._was_told or len(self._confirmed) >= self.roster.quorum

    @property
    def secret(self) -> Secret:
        """The secret that was agreed on.

        Raises
        ------
        NotConfirmed
            While the other members may still agree on another secret.
        """
        held = self._held()
        self._require_agreement()
        return held

    def card(self) -> bytes:
        """Return the message that asks for an envelope, the same at each call."""
        return self._card

    def seal(
        self, cards: Mapping[str, bytes] | Iterable[bytes], secret: Secret | None = None
    ) -> dict[str, bytes]:
        """Seal the secret to the owners of cards.

        Parameters
        ----------
        cards
            The cards of other members, by fingerprint if they are a mapping. The member's own
            card is left out.
        secret
            The secret to seal, if this member has it from another source. By default the secret
            that it has taken. If it has taken none and is the leader, it draws one.

        Returns
        -------
        dict
            Fingerprint -> envelope.

        Raises
        ------
        AgreementFailed
            If a card cannot be accepted: then nothing is sealed to any member. ``NotLeader`` if
            this member has no secret and another one has to draw it.

        Notes
        -----
        Ask one member at a time to draw a secret. If it vanishes, first ask members that have
        opened one of its envelopes: members that have taken different secrets cannot agree.
        """
        known = self._checked_cards(cards)
        if secret is not None:
            self._check_given(secret)
            taken = secret
        elif self._taken is not None:
            taken = self._taken
        else:
            leader = self.roster.leader([self.fingerprint, *known])
            if leader != self.fingerprint:
                raise NotLeader(
                    f"{shortened(self.fingerprint)} has no secret and must not draw one while "
                    f"there is a card of {shortened(leader)}; ask that member, or leave its card out"
                )
            taken = Secret.new(self.roster.run, self.roster.epoch)
        envelopes = {
            owner: Envelope.write(
                self.identity, self.roster, card, taken, says_agreed=self.has_agreed
            )
            for owner, card in known.items()
        }
        self._take(taken)
        return envelopes

    def open(self, envelope: bytes) -> None:
        """Open an envelope and take its secret, which can be used once it is confirmed.

        Raises
        ------
        AgreementFailed
            If it is not from a member, not for this card, or has a second secret (``SplitView``).
        """
        read = Envelope.read(envelope, self.roster)
        if read.recipient != self.fingerprint:
            raise WrongRecipient(
                f"the envelope is for {shortened(read.recipient)}; "
                f"this is {shortened(self.fingerprint)}"
            )
        if read.card_digest != Card.read(self._card, self.roster).digest:
            raise ReplayedEnvelope(
                f"the envelope of {shortened(read.sender)} is for another card of "
                f"{shortened(self.fingerprint)} than the present one; ask for a new envelope"
            )
        opened = read.secret_inside(self._card_key, self.roster)
        # A secret that more than half have taken may replace ours, which can never be agreed on.
        may_change = read.says_agreed and not self.has_agreed
        if self._taken not in (None, opened) and not may_change:
            raise SplitView(
                f"{shortened(read.sender)} sends another secret than the one that "
                f"{shortened(self.fingerprint)} has taken in epoch {self.roster.epoch}; "
                "it stays with the first"
            )
        self._take(opened)
        self._was_told |= read.says_agreed

    def confirmation(self) -> bytes:
        """Return the message that proves which secret the member has, without revealing it.

        Raises
        ------
        NotConfirmed
            If the member has no secret yet.
        """
        return Confirmation.write(self.fingerprint, self.roster, self._held())

    def check(self, confirmations: Iterable[bytes]) -> None:
        """Check some or all confirmations; the member's own may be among them.

        Raises
        ------
        SplitView
            If one of them is for another secret, or was changed. Then none of them counts.
        NotConfirmed
            If all are valid, but more are needed. They count for the next call.
        AgreementFailed
            If one of them is no confirmation, or not from a member in this run and epoch.
        """
        key = confirmation_key(self._held())
        confirmed = set()
        for blob in confirmations:
            confirmation = Confirmation.read(blob, self.roster)
            if not confirmation.fits(key):
                raise SplitView(
                    f"the confirmation of {shortened(confirmation.member)} does not fit the "
                    f"secret of {shortened(self.fingerprint)}: the server showed them different "
                    "secrets, or changed the confirmation"
                )
            confirmed.add(confirmation.member)
        self._confirmed |= confirmed
        self._require_agreement()

    def to_bytes(self) -> bytes:
        """Write the member's state, encrypted for its own identity.

        Keep it where a process may end between two messages. A member without its state may take
        a second secret.
        """
        taken = self._taken.key if self._taken else b""
        confirmed = b"".join(bytes.fromhex(member) for member in sorted(self._confirmed))
        was_told = bytes([self._was_told])
        memory = pack(self._card_key.private_bytes_raw(), taken, was_told, confirmed)
        statement = heading(b"memory", self.roster, bytes.fromhex(self.fingerprint))
        nonce = secrets.token_bytes(NONCE_BYTES)
        return statement + pack(nonce, self._cipher.encrypt(nonce, memory, statement))

    @classmethod
    def from_bytes(cls, identity: Identity, roster: Roster, remembered: bytes) -> Member:
        """Read a member that :meth:`to_bytes` has written.

        Raises
        ------
        AgreementFailed
            If the bytes were changed, or are of another member, run, epoch or roster.
        """
        member = cls(identity, roster)
        max_bytes = 1024 + FINGERPRINT_BYTES * len(roster.members)
        fields = unpack(
            remembered,
            [*HEADING_SIZES, FINGERPRINT_BYTES, NONCE_BYTES, None],
            max_bytes=max_bytes,
        )
        owner, nonce, encrypted = fields[len(HEADING_SIZES) :]
        check_heading(b"memory", fields, roster, sender=owner.hex())
        statement = heading(b"memory", roster, bytes.fromhex(member.fingerprint))
        try:
            memory = member._cipher.decrypt(nonce, encrypted, statement)
        except InvalidTag:
            raise DamagedMessage(
                f"the saved state of {shortened(identity.fingerprint)} was changed, or is another "
                "member's; begin again with a new card"
            ) from None
        key, taken, was_told, confirmed = unpack(memory, [32, None, 1, None], max_bytes=max_bytes)
        member._card_key = X25519PrivateKey.from_private_bytes(key)
        if taken:
            member._taken = Secret(taken, roster.run, roster.epoch)
        member._was_told = was_told == b"\1"
        member._confirmed = {
            confirmed[start : start + FINGERPRINT_BYTES].hex()
            for start in range(0, len(confirmed), FINGERPRINT_BYTES)
        }
        return member

    @cached_property
    def _card(self) -> bytes:
        return Card.write(self.identity, self.roster, self._card_key.public_key())

    @cached_property
    def _cipher(self) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(self.identity.derived("memory of a key agreement"))

    def _checked_cards(self, cards: Mapping[str, bytes] | Iterable[bytes]) -> dict[str, Card]:
        """Read the cards of other members, at most one each."""
        if isinstance(cards, Mapping):
            read = {name: Card.read(blob, self.roster) for name, blob in cards.items()}
            for name, card in read.items():
                if name != card.owner:
                    raise SwappedCard(
                        f"under the name of {shortened(name)} there is a card of "
                        f"{shortened(card.owner)}; nothing is sealed to either"
                    )
        else:
            read = {}
            for blob in cards:
                card = Card.read(blob, self.roster)
                if read.setdefault(card.owner, card) != card:
                    raise SwappedCard(
                        f"there are two different cards of {shortened(card.owner)}; "
                        "pass on the last one that it sent"
                    )
        return {name: card for name, card in read.items() if name != self.fingerprint}

    def _check_given(self, secret: Secret) -> None:
        if (secret.run, secret.epoch) != (self.roster.run, self.roster.epoch):
            raise ValueError(f"{secret} is not for {self.roster}; leave it out to draw one")
        if self._taken not in (None, secret):
            raise ValueError(f"{secret} is not the one that was taken, {self._taken}")

    def _take(self, secret: Secret) -> None:
        if self._taken != secret:
            self._taken = secret
            self._confirmed = {self.fingerprint}

    def _held(self) -> Secret:
        if self._taken is None:
            raise NotConfirmed(
                f"{shortened(self.fingerprint)} has no secret yet; it needs an envelope"
            )
        return self._taken

    def _require_agreement(self) -> None:
        if not self.has_agreed:
            raise NotConfirmed(
                f"{shortened(self.fingerprint)} has confirmations of its secret from "
                f"{len(self._confirmed)} of {len(self.roster.members)} members, and needs "
                f"{self.roster.quorum}; wait for more confirmations"
            )

    def __repr__(self) -> str:
        state = "agreed" if self.has_agreed else "not agreed"
        return f"<Member {shortened(self.fingerprint)} of {self.roster}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a member is not pickled; keep it with to_bytes()")
