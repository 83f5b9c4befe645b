"""Messages to clients."""

from flwr.app import ConfigRecord

from flower.federations import (
    make_grid,
    start,
)


def test_all_nodes_at_a_position_get_the_same_record():
    grid = make_grid()

    result = start(grid)

    last = [m for m in grid.sent if m.metadata.group_id == "30"]
    assert len({id(message.content) for message in last}) == 2 * len(result.clusters)
    assert {m.content["config"]["server-round"] for m in last} == {30}


def test_the_users_config_arrives_and_stays_as_it_was():
    grid, config = make_grid(), ConfigRecord({"lr": 0.5})

    start(grid, num_rounds=1, start_with={"train_config": config})

    assert grid.sent[0].content["config"] == ConfigRecord({"lr": 0.5, "server-round": 1})
    assert config == ConfigRecord({"lr": 0.5})


def test_without_evaluation_no_client_is_asked_for_it():
    grid = make_grid()

    result = start(grid, num_rounds=2, fraction_evaluate=0.0)

    assert {message.metadata.message_type for message in grid.sent} == {"train"}
    assert result.evaluate_metrics_clientapp == {}


def test_without_training_clients_are_evaluated_all_the_same():
    result = start(make_grid(), num_rounds=1, fraction_train=0.0)

    assert len(result.history[0].evaluation) == 6
