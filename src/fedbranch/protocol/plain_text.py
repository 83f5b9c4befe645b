"""Text from outside, shortened and cleaned so that it can be printed and stored."""

from __future__ import annotations

import re
import reprlib

__all__ = ["one_line", "shortened"]

# Whatever a client says is kept for ever in the history, so nobody may say much.
LONGEST_REASON = 300  # characters of a reason, part of which a client may have written


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # another one each time


_briefly = reprlib.Repr()


_briefly.maxstring = _briefly.maxother = _briefly.maxlong = 80


def shortened(value: object) -> str:
    """Show a value from outside in a few words, however large it is."""
    try:
        text = _briefly.repr(value)
    except Exception:  # a whole number with too many digits, or an object with a broken repr
        return f"a {type(value).__name__} that cannot be shown"
    return one_line(_ADDRESS.sub("", text), 80)


def one_line(text: str, longest: int = LONGEST_REASON) -> str:
    r"""Give a text from outside as one line that a terminal only prints.

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
