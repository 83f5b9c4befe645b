"""What can go wrong that no argument check could have caught.

::

    FedbranchError
    ├── InvalidUpdate       a client's reply cannot be used; the server refuses it and goes on
    ├── ClientFailed        a simulated client's model or data raised; it says whose
    ├── InvalidExperiment   an experiment file asks for something that does not exist
    ├── FederationStalled   too few nodes of a federation are there for too long
    ├── DamagedFile         a file is missing, incomplete or was changed
    ├── MissingData         a data set is not in its folder, and could not be fetched
    └── UnusableRun         a run folder is not one, is taken, or is already complete

A wrong argument of a call is a ``ValueError`` or ``TypeError`` as everywhere in Python.
"""

__all__ = [
    "ClientFailed",
    "DamagedFile",
    "FedbranchError",
    "FederationStalled",
    "InvalidExperiment",
    "InvalidUpdate",
    "MissingData",
    "UnusableRun",
]


class FedbranchError(Exception):
    """Base of all errors that data, files or clients cause."""


class InvalidUpdate(FedbranchError):
    """A client's reply cannot be used."""


class ClientFailed(FedbranchError):
    """A simulated client's model, loss or data raised an error."""


class InvalidExperiment(FedbranchError):
    """An experiment file asks for something that does not exist."""


class FederationStalled(FedbranchError):
    """Too few nodes of a federation are there for too long."""


class DamagedFile(FedbranchError):
    """A file is missing, incomplete or was changed since it was written."""


class MissingData(FedbranchError):
    """A data set is not in its folder, and could not be fetched."""


class UnusableRun(FedbranchError):
    """A run folder is not one, is taken, or is already complete."""
