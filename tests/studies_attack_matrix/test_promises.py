"""Cells that break a promise of docs/reliability.md are named."""

from studies.attack_matrix.promises import broken_promises, complaints


def test_a_promise_that_is_not_kept_is_named():
    kept = {"points_lost": 0.5, "precision": 1.0, "recall": 1.0, "out_by": 3, "share_out": 0.9}

    assert complaints("label-flip", kept) == complaints("times-100", kept) == []
    assert len(complaints("label-flip", kept | {"points_lost": 1.1})) == 1
    assert len(complaints("direction", kept | {"precision": 0.9})) == 1
    assert len(complaints("direction", kept | {"precision": None, "recall": 0.0})) == 1
    assert len(complaints("times-100", kept | {"out_by": 4})) == 1
    assert len(complaints("gaussian", kept | {"out_by": None})) == 1
    assert len(complaints("gaussian-10", kept | {"share_out": 0.5})) == 1
    assert len(complaints("mimic", kept | {"points_lost": 5.1})) == 1


def test_a_cell_with_small_groups_may_cost_more_accuracy():
    found = {"points_lost": 9.0, "precision": 1.0, "recall": 1.0, "out_by": 3, "share_out": 0.9}
    cell = {"attack": "label-flip", "percent": 40, "num_groups": 2, "seed": 7}

    def broken(**changes):
        return broken_promises([{"cell": cell | changes, "methods": {"CFL": found}}])

    assert broken() == ["label-flip, 40 %, 2 group(s), seed 7: 9.0 points lost, more than 1.0"]
    assert broken(num_groups=4) == []  # three honest clients in each
