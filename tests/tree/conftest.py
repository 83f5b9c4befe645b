import pytest

from fedbranch import ParameterTree
from tree.made_edges import EAST, NORTH, SOUTH, WEST, vector


@pytest.fixture
def tree():
    """Root split into east {a, b} and the rest {c, d, e}; the rest into west {c} and {d, e}.

    ::

        0 ── 1 (a, b)
          └─ 2 ── 3 (c)
               └─ 4 (d, e)
    """
    tree = ParameterTree(2)
    for client_id in "abcde":
        tree.place(client_id, 0)
    tree.advance(0, vector(10, 10))
    tree.split(0, [{"a": EAST, "b": EAST}, {"c": WEST, "d": WEST, "e": WEST}], in_round=5)
    tree.advance(2, vector(0, 5))
    tree.split(2, [{"c": NORTH}, {"d": SOUTH, "e": SOUTH}], in_round=9)
    return tree
