"""What clients do so that the server learns less: client-side, the server never notices."""

try:
    import cryptography  # noqa: F401 -- only to see whether it is there
except ModuleNotFoundError as error:
    raise ImportError(
        f"fedbranch.privacy needs cryptography ({error}); run: pip install 'fedbranch[privacy]'"
    ) from error

from fedbranch.privacy.secret import Secret
from fedbranch.privacy.transforms import Kind, Permutation, Rotation, Transform

__all__ = ["Kind", "Permutation", "Rotation", "Secret", "Transform"]
