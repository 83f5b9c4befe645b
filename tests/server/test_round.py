"""A round is decided as a whole, or it does not happen."""

import numpy as np
import pytest

from fedbranch import NeverSplit, Server, Update


def test_a_rule_that_fails_once_can_be_asked_again():
    class Moody:
        moods = iter(["bad", "good"])

        def examine(self, evidence):
            if next(self.moods) == "bad":
                raise RuntimeError("not today")
            return NeverSplit().examine(evidence)

    server = Server(1, rule=Moody())
    server.plan(["a"])
    with pytest.raises(RuntimeError, match="not today"):
        server.step({"a": Update(np.float32([1]), 1)})

    record = server.step({"a": Update(np.float32([1]), 1)})

    assert (record.round, record.refused) == (1, {})
    assert server.tree.root.params.tolist() == [1]
