"""What can go wrong that no argument check could have caught.

::

    FedbranchError
    ├── InvalidUpdate       a client's reply cannot be used; the server refuses it and goes on
    ├── ClientFailed        a client's model or data raised; it says whose, or where
    ├── InvalidExperiment   an experiment file asks for something that does not exist
    ├── TransformMismatch   a model is not hidden as this client hides it; nothing is sent
    ├── FederationStalled   too few nodes of a federation are there for too long
    ├── DamagedFile         a file is missing, incomplete or was changed
    ├── CannotWrite         the disk is full, or refuses a file; an OSError as well
    ├── MissingData         a data set is not in its folder, and could not be fetched
    ├── UnusableRun         a run folder is not one, is taken, or is already complete
    └── AgreementFailed     a member of a federation refuses what it was told about the secret
        ├── DamagedMessage  cut, changed on the way, forged, or no such message at all
        ├── NotInRoster     from a sender that never was a member, or was removed
        ├── WrongRun        from another run
        ├── StaleEpoch      from another epoch of the run
        ├── WrongRoster     from a member with another list of members
        ├── SwappedCard     a card that stands in the place of another one
        ├── NotLeader       another member is to draw the secret
        ├── WrongRecipient  an envelope that is sealed to another member
        ├── ReplayedEnvelope  an envelope for a card of ours that is no longer in use
        ├── SplitView       members were given different secrets
        └── NotConfirmed    too few members are known to have the same secret

    UsingPreviousState      a warning: what was saved last is damaged, the state before it is used

A wrong argument of a call is a ``ValueError`` or ``TypeError`` as everywhere in Python.
"""

__all__ = [
    "AgreementFailed",
    "CannotWrite",
    "ClientFailed",
    "DamagedFile",
    "DamagedMessage",
    "FedbranchError",
    "FederationStalled",
    "InvalidExperiment",
    "InvalidUpdate",
    "MissingData",
    "NotConfirmed",
    "NotInRoster",
    "NotLeader",
    "ReplayedEnvelope",
    "SplitView",
    "StaleEpoch",
    "SwappedCard",
    "TransformMismatch",
    "UnusableRun",
    "UsingPreviousState",
    "WrongRecipient",
    "WrongRoster",
    "WrongRun",
]


class FedbranchError(Exception):
    """Base of all errors that data, files or clients cause."""


class InvalidUpdate(FedbranchError):
    """A client's reply cannot be used."""


class ClientFailed(FedbranchError):
    """A client's model, loss or data raised an error."""


class InvalidExperiment(FedbranchError):
    """An experiment file asks for something that does not exist."""


class TransformMismatch(FedbranchError):
    """A model is not hidden as this client hides it, or cannot be hidden."""


class FederationStalled(FedbranchError):
    """Too few nodes of a federation are there for too long."""


class DamagedFile(FedbranchError):
    """A file is missing, incomplete or was changed since it was written."""


class CannotWrite(FedbranchError, OSError):
    """A file cannot be written: the disk is full, or refuses.

    ``errno`` says why, ``filename`` which one.
    """

    def __str__(self) -> str:
        return str(self.strerror)


class UsingPreviousState(UserWarning):
    """What was saved last is damaged; the state before it is used."""


class MissingData(FedbranchError):
    """A data set is not in its folder, and could not be fetched."""


class UnusableRun(FedbranchError):
    """A run folder is not one, is taken, or is already complete."""


class AgreementFailed(FedbranchError):
    """A member of a federation refuses what it was told about the shared secret."""


class DamagedMessage(AgreementFailed):
    """A message is cut, was changed on the way or forged, or is no such message at all."""


class NotInRoster(AgreementFailed):
    """A message comes from a sender that never was a member, or was removed."""


class WrongRun(AgreementFailed):
    """A message belongs to another run."""


class StaleEpoch(AgreementFailed):
    """A message belongs to another epoch of the run."""


class WrongRoster(AgreementFailed):
    """A message comes from a member with another list of members."""


class SwappedCard(AgreementFailed):
    """A card stands in the place of another one."""


class NotLeader(AgreementFailed):
    """Another member is to draw the secret."""


class WrongRecipient(AgreementFailed):
    """An envelope is sealed to another member."""


class ReplayedEnvelope(AgreementFailed):
    """An envelope is for a card of ours that is no longer in use."""


class SplitView(AgreementFailed):
    """Members were given different secrets."""


class NotConfirmed(AgreementFailed):
    """Too few members are known to have the same secret."""
