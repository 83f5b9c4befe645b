"""Published files as their publishers offer them: names, SHA-256 and addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Download", "mirrored"]


@dataclass(frozen=True, kw_only=True)
class Download:
    """One published file.

    Attributes
    ----------
    name
        Its file name, for example ``cifar-10-binary.tar.gz``.
    sha256
        The SHA-256 of the file as it is downloaded, in hexadecimal digits.
    urls
        Its addresses, in the order in which they are tried.
    members
        For a tar archive: path in the archive -> file of the set. Other members are not
        unpacked. Empty if the download itself is a file of the set, plain or ``.gz``.
    """

    name: str
    sha256: str
    urls: tuple[str, ...]
    members: Mapping[str, str] = field(default_factory=dict)

    @property
    def file_names(self) -> tuple[str, ...]:
        """The files of the set that it contains, without ``.gz``."""
        return tuple(self.members.values()) or (self.name.removesuffix(".gz"),)


def mirrored(sums: Mapping[str, str], *mirrors: str) -> tuple[Download, ...]:
    """Make downloads of files that have the same names on every mirror.

    Parameters
    ----------
    sums
        File name -> SHA-256.
    mirrors
        Addresses that end with a slash; file names are added to them. The first is tried first.

    Examples
    --------
    >>> mirrored({"a.gz": "00ff"}, "https://one/", "https://two/")[0].urls
    ('https://one/a.gz', 'https://two/a.gz')
    """
    return tuple(
        Download(name=name, sha256=digest, urls=tuple(mirror + name for mirror in mirrors))
        for name, digest in sums.items()
    )
