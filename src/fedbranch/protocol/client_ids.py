"""Client ids: which are allowed, and how messages name clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import islice

from fedbranch.protocol.plain_text import shortened

__all__ = ["checked_ids", "shown_id", "some_of"]

LONGEST_ID = 1000  # characters of a client id


def checked_ids(client_ids: Iterable[str]) -> list[str]:
    """Check client ids, and return them as a list.

    Every file and every message can carry an id that passes. Ids are compared code point by code
    point: two that only look alike, by their case or by how an accent is written, are two clients.

    Raises
    ------
    TypeError
        If one is not a string, or is empty.
    ValueError
        If one is too long, not printable, begins or ends with a blank, or is there twice.
    """
    ids = list(client_ids)
    if isinstance(client_ids, str) or not all(isinstance(i, str) and i for i in ids):
        raise TypeError(f"client_ids are {shortened(ids)}; pass a list of non-empty strings")
    for client_id in ids:
        if (
            len(client_id) <= LONGEST_ID
            and client_id.isprintable()
            and client_id.strip() == client_id
        ):
            continue
        if len(client_id) > LONGEST_ID:
            problem = f"has {len(client_id)} characters; use at most {LONGEST_ID}"
        elif any("\ud800" <= character <= "\udfff" for character in client_id):
            problem = "is not valid Unicode"
        else:
            problem = "begins or ends with a blank, or has characters that cannot be seen"
        raise ValueError(f"the client id {shortened(client_id)} {problem}")
    twice = [client_id for client_id, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"clients {some_of(twice)} are named more than once; name each once")
    return ids


def some_of(client_ids: Collection[str], most: int = 10) -> str:
    """Describe clients for a message: the first ``most`` of them by id, the others by their number.

    Examples
    --------
    >>> some_of(["a", "b", "c"], most=2)
    "['a', 'b'] and 1 more"
    """
    named = f"{list(islice(client_ids, most))}"
    return named if len(client_ids) <= most else f"{named} and {len(client_ids) - most:,} more"


def shown_id(client_id: object) -> str:
    """Return the name of a client for the record, even if its id is not a string."""
    return client_id if isinstance(client_id, str) else shortened(client_id)
