"""What a user reads while a federation runs, and at its end."""

from flwr.app import ArrayRecord

from fedbranch.flower import ClusteredStrategy
from flower.federations import (
    RULE,
    make_grid,
    make_model,
    start,
)


def test_the_log_says_what_a_user_of_fedavg_would_not_expect(caplog):
    strategy = ClusteredStrategy(rule=RULE, weighted_by_key="num_examples")
    strategy.start(make_grid(), ArrayRecord(make_model().state_dict()), num_rounds=1)
    assert "No client's update was ever used" in caplog.text
    assert "with 'num_examples' (the strategy's weighted_by_key)" in caplog.text
    assert "Its metrics are ['loss', 'num-examples']" in caplog.text

    start(make_grid(), num_rounds=2)
    assert "node 0: train: mean " in caplog.text
    assert "Nothing was split: not stationary" in caplog.text

    start(make_grid())
    assert "result.arrays is the model at the root" in caplog.text
