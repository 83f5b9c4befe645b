"""The population: the nodes at which clients stand, and which clients are away.

The door of this room: other rooms import from here. :class:`Positions` has the clients,
:class:`Presence` when each was seen last; :func:`pack_ids` and :func:`unpack_ids` put client ids
into files.
"""

from fedbranch.population.packed_ids import pack_ids, unpack_ids
from fedbranch.population.positions import LARGEST_NODE_ID, Positions
from fedbranch.population.presence import ROUNDS_UNTIL_AWAY, Presence

__all__ = [
    "LARGEST_NODE_ID",
    "ROUNDS_UNTIL_AWAY",
    "Positions",
    "Presence",
    "pack_ids",
    "unpack_ids",
]
