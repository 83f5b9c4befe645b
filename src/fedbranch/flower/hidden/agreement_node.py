"""A node's part in the key agreement, in Flower messages.

The server asks (:mod:`fedbranch.flower.hidden.agreement_server`), a node answers, and
:mod:`fedbranch.privacy.agreement` says what it may believe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedbranch.errors import AgreementFailed, DamagedMessage, NotConfirmed
from fedbranch.flower.hidden.mod import MESSAGE_TYPE, RECORD, ClientFunction, masked
from fedbranch.privacy import Identity, Member, Roster, Secret
from fedbranch.storage.atomic import replace_file

if sys.platform != "win32":
    import fcntl

__all__ = ["AGREED", "MESSAGE_TYPE", "NONE", "RECORD", "TAKEN", "AgreementMod"]

T = TypeVar("T")
OfContext: TypeAlias = T | Callable[[Context], T]

# What a member can say about its secret, from best to worst.
AGREED, TAKEN, NONE = "agreed", "taken", "none"


class AgreementMod:
    """A node's part in the key agreement: a query function for its client app.

    Parameters
    ----------
    identity
        This node's own, or how to get it from the context.
    roster
        Who belongs to the run, as people settled it without the server, or how to get it.
    folder
        Where this node remembers what it has agreed on, or how to get it from the context: there
        is one secret for every epoch then, whatever the server does. None: only for this run of
        Flower, in ``context.state``. A server that begins another run of Flower makes the node
        forget, and take another secret in the same epoch. Both are encrypted under the
        identity.

    Examples
    --------
    ::

        agreement = AgreementMod(my_identity, roster, folder)
        app = ClientApp(mods=[transform_mod(agreement.secret, initial_model)])
        app.query("fedbranch")(agreement)

    An app that is made of a ``client_fn`` has it as a mod: ``mods=[agreement, transform_mod(...)]``.
    """

    def __init__(
        self,
        identity: OfContext[Identity],
        roster: OfContext[Roster],
        folder: OfContext[Path | str] | None,
    ) -> None:
        self._identity = identity
        self._roster = roster
        self._folder = folder

    def secret(self, context: Context) -> Secret:
        """Give the secret that was agreed on; for ``transform_mod``.

        Raises
        ------
        NotConfirmed
            As long as there is none.
        """
        return self._member(context).secret

    def __call__(
        self, message: Message, context: Context, call_next: ClientFunction | None = None
    ) -> Message:
        """Answer a message of the agreement; as a mod, pass on all others.

        Raises
        ------
        AgreementFailed
            If something came that no honest server would pass on.
        """
        if message.metadata.message_type != MESSAGE_TYPE and call_next is not None:
            return call_next(message, context)
        with masked("the key agreement"), self._one_at_a_time(context):
            member = self._member(context)
            try:
                answer = _answer(member, _content(message))
            finally:
                # Before anything is sent. A member that forgets may take another secret.
                self._remember(member, context)
            content = RecordDict({RECORD: ConfigRecord({**_state(member), **answer})})
            return Message(content, reply_to=message)

    @contextmanager
    def _one_at_a_time(self, context: Context) -> Iterator[None]:
        """Keep all others from the folder, or two messages at once could bring two secrets."""
        if self._folder is None:
            yield
            return
        folder = self._folder_of(context)
        folder.mkdir(parents=True, exist_ok=True)
        if sys.platform == "win32":  # which has no such locks
            yield
            return
        with (folder / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _folder_of(self, context: Context) -> Path:
        assert self._folder is not None
        return Path(self._folder(context) if callable(self._folder) else self._folder)

    def _member(self, context: Context) -> Member:
        identity, roster = _of(context, self._identity), _of(context, self._roster)
        name = _memory_name(identity, roster)
        if self._folder is None:
            record = context.state.config_records.get(name, ConfigRecord())
            kept = record.get("memory")
            memory = kept if isinstance(kept, bytes) else None
        else:
            path = self._folder_of(context) / name
            memory = path.read_bytes() if path.exists() else None
        if memory is None:
            return Member(identity, roster)
        return Member.from_bytes(identity, roster, memory)

    def _remember(self, member: Member, context: Context) -> None:
        name = _memory_name(member.identity, member.roster)
        if self._folder is None:
            context.state[name] = ConfigRecord({"memory": member.to_bytes()})
        else:
            replace_file(self._folder_of(context) / name, member.to_bytes(), is_private=True)


def _of(context: Context, value: OfContext[T]) -> T:
    return value(context) if callable(value) else value


def _memory_name(identity: Identity, roster: Roster) -> str:
    """Name what is remembered: every run, epoch and member is another agreement."""
    return f"{RECORD}-{roster.digest.hex()[:32]}-{identity.fingerprint[:32]}"


def _content(message: Message) -> ConfigRecord:
    if not message.has_content() or RECORD not in message.content.config_records:
        raise DamagedMessage(f"a message of the key agreement without its record {RECORD!r}")
    return message.content.config_records[RECORD]


def _state(member: Member) -> dict[str, str | bytes]:
    """Say how far a member is. Nobody has to believe it: it only helps the server to ask."""
    state = AGREED if member.has_agreed else TAKEN if member.has_taken_a_secret else NONE
    said: dict[str, str | bytes] = {
        "member": member.fingerprint,
        "roster": member.roster.digest.hex(),
        "state": state,
    }
    if state != NONE:
        said["confirmation"] = member.confirmation()
    if state == AGREED:
        said["secret"] = member.secret.fingerprint
    return said


def _answer(member: Member, asked: ConfigRecord) -> dict[str, bytes | list[str] | list[bytes]]:
    """Do what the server asks for, as far as a member may."""
    match asked.get("step"):
        case "card":
            return {"card": member.card()}
        case "seal":
            envelopes = member.seal(_blobs(asked, "cards"))
            return {"members": list(envelopes), "envelopes": list(envelopes.values())}
        case "open":
            for envelope in _blobs(asked, "envelopes"):
                member.open(envelope)
        case "check":
            _check(member, _blobs(asked, "confirmations"))
        case step:
            raise DamagedMessage(f"the server asks for {str(step)[:40]!r}, which is no step")
    return {}


def _check(member: Member, confirmations: list[bytes]) -> None:
    """Check confirmations one by one: some may be of members that were left behind."""
    failed: AgreementFailed | None = None
    for confirmation in confirmations:
        try:
            member.check([confirmation])
        except NotConfirmed as error:
            failed = failed or error
        except AgreementFailed as error:
            failed = error
    if not member.has_agreed:
        raise failed or NotConfirmed("the server passed on no confirmations")


def _blobs(asked: ConfigRecord, name: str) -> list[bytes]:
    found = asked.get(name)
    blobs = [blob for blob in found if isinstance(blob, bytes)] if isinstance(found, list) else []
    if blobs != found:
        raise DamagedMessage(f"a message of the key agreement without its {name}")
    return blobs
