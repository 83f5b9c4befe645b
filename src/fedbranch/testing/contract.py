"""A contract whose clauses can be broken: the errors that all checks raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Contract", "shortened"]

LONGEST_SHOWN = 300  # characters of a value in a message


class Contract(NamedTuple):
    """A contract, to say where it is written and which of its clauses is broken.

    Attributes
    ----------
    name
        The class whose docstring has the contract.
    subject
        The thing that is checked.
    """

    name: str
    subject: str

    def broken(self, clause: str, found: str, remedy: str) -> AssertionError:
        """Make the error for a clause that does not hold.

        Parameters
        ----------
        clause
            What the contract says.
        found
            What was observed, with the values.
        remedy
            What to do.
        """
        return AssertionError(
            f"{self.subject} breaks the contract of {self.name}.\n"
            f"  clause: {clause}\n  found:  {found}\n  to do:  {remedy}"
        )

    @contextmanager
    def answering(self, call: str) -> Iterator[None]:
        """Turn any error of the checked thing into one that names the call.

        Parameters
        ----------
        call
            The call that must return, in words.
        """
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            raise self.broken(
                f"{call} returns",
                f"{type(error).__name__}: {error}",
                "look at the error above, which is the cause of this one",
            ) from error


def shortened(value: object) -> str:
    """Show a value in a message, without its end if it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "..."
