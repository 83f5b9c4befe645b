"""What clients do so that the server learns less from their updates.

All of it runs on the client's side. The server needs no support for it.
"""

try:
    import cryptography  # noqa: F401 -- imported to check that it is installed
except ModuleNotFoundError as error:
    raise ImportError(
        f"fedbranch.privacy needs cryptography ({error}); run: pip install 'fedbranch[privacy]'"
    ) from error

from fedbranch.privacy.agreement import Member
from fedbranch.privacy.identity import Identity, Roster
from fedbranch.privacy.noise import Noise
from fedbranch.privacy.privacy import Privacy
from fedbranch.privacy.secret import Secret
from fedbranch.privacy.sketch import Sketch
from fedbranch.privacy.transforms import Kind, Permutation, Rotation, Transform

__all__ = [
    "Identity",
    "Kind",
    "Member",
    "Noise",
    "Permutation",
    "Privacy",
    "Roster",
    "Rotation",
    "Secret",
    "Sketch",
    "Transform",
]
