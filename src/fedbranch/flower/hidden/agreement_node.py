"""A node's part in the key agreement, in Flower messages.

The server asks (:mod:`fedbranch.flower.hidden.agreement_server`) and a node answers;
:mod:`fedbranch.privacy.agreement` decides what the node may believe.
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

# The states of a member's secret, from best to worst.
AGREED, TAKEN, NONE = "agreed", "taken", "none"


class AgreementMod:
    """A node's part in the key agreement: a query function for its client app.

    Parameters
    ----------
    identity
        This node's own identity, or a function that returns it for a context.
    roster
        The members of the run, as people settled them without the server; or a function that
        returns them for a context.
    folder
        The folder in which this node remembers its secret, or a function that returns it for a
        context. There is then one secret for every epoch, whatever the server does. None: the
        node remembers it in ``context.state``, for this run of Flower only. A server that begins
        another run of Flower can then make the node take another secret in the same epoch. Both
        kinds of memory are encrypted under the identity.

    Examples
    --------
    ::

        agreement = AgreementMod(my_identity, roster, folder)
        app = ClientApp(mods=[transform_mod(agreement.secret, initial_model)])
        app.query("fedbranch")(agreement)

    In an app that is made of a ``client_fn`` it is a mod: ``mods=[agreement, transform_mod(...)]``.
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
        """Return the secret that was agreed on; for ``transform_mod``.

        Raises
        ------
        NotConfirmed
            Until there is one.
        """
        return self._member(context).secret

    def __call__(
        self, message: Message, context: Context, call_next: ClientFunction | None = None
    ) -> Message:
        """Answer a message of the agreement; as a mod, pass on all others.

        Raises
        ------
        AgreementFailed
            If something comes that no honest server would pass on.
        """
        if message.metadata.message_type != MESSAGE_TYPE and call_next is not None:
            return call_next(message, context)
        with masked("the key agreement"), self._one_at_a_time(context):
            member = self._member(context)
            try:
                answer = _answer(member, _content(message))
            finally:
                # Before anything is sent: a member that forgets may take another secret.
                self._remember(member, context)
            content = RecordDict({RECORD: ConfigRecord({**_state(member), **answer})})
            return Message(content, reply_to=message)

    @contextmanager
    def _one_at_a_time(self, context: Context) -> Iterator[None]:
        """Lock the folder: two messages at once could otherwise bring two secrets."""
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
    """Return the name of the memory: every run, epoch and member has an agreement of its own."""
    return f"{RECORD}-{roster.digest.hex()[:32]}-{identity.fingerprint[:32]}"


def _content(message: Message) -> ConfigRecord:
    if not message.has_content() or RECORD not in message.content.config_records:
        raise DamagedMessage(f"a message of the key agreement without its record {RECORD!r}")
    return message.content.config_records[RECORD]


def _state(member: Member) -> dict[str, str | bytes]:
    """Describe the state of a member. It only helps the server to ask; no member relies on it."""
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
    """Carry out a step that the server asks for, as far as a member may."""
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
    """Check confirmations one by one: some may come from members with another secret."""
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
