"""Text from outside, shortened and cleaned so that it can be printed and stored."""

from __future__ import annotations

import re
import reprlib

__all__ = ["one_line", "shortened"]

# A reason may quote a client, and records keep it for ever, so its length is limited.
LONGEST_REASON = 300  # characters
LONGEST_VALUE = 80  # characters of a value that is quoted in a reason

# Memory addresses differ from run to run; records of the same run must not.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

_briefly = reprlib.Repr()
_briefly.maxstring = _briefly.maxother = _briefly.maxlong = LONGEST_VALUE


def shortened(value: object) -> str:
    """Describe a value from outside in at most 80 characters, however large it is.

    Examples
    --------
    >>> shortened([0.5] * 1000)
    '[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...]'
    """
    try:
        text = _briefly.repr(value)
    except Exception:  # a whole number with too many digits, or an object with a broken repr
        return f"a {type(value).__name__} that cannot be shown"
    return one_line(_ADDRESS.sub("", text), LONGEST_VALUE)


def one_line(text: str, longest: int = LONGEST_REASON) -> str:
    r"""Return a text from outside as one line without characters that control a terminal.

    Parameters
    ----------
    text
        Of any length.
    longest
        Characters of the line; a longer text is cut and ends with "...".

    Examples
    --------
    >>> one_line("out of memory\n\x1b[2Jtry again")
    'out of memory ?[2Jtry again'
    """
    words = " ".join(text[: 2 * longest].split())
    line = "".join(c if c.isprintable() else "?" for c in words)
    return (
        line if len(line) <= longest and len(text) <= 2 * longest else line[: longest - 3] + "..."
    )
