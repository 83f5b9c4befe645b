"""The server app: Flower's usual one, with another strategy."""

from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedbranch.flower import ClusteredStrategy
from swapped_digits import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation."""
    config = context.run_config
    arrays = ArrayRecord({name: Array(array) for name, array in task.initial_model().items()})
    make_strategy(config).start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=config["num-server-rounds"],
        timeout=config["round-timeout"],
    )


def make_strategy(config: dict) -> Strategy:
    """Choose between one model for all and one for each cluster."""
    shared = {
        "fraction_train": config["fraction-train"],
        "fraction_evaluate": config["fraction-evaluate"],
        "min_available_nodes": config["min-nodes"],
    }
    if config["strategy"] == "fedavg":
        return FedAvg(**shared)
    return ClusteredStrategy(
        **shared,
        checkpoint_dir=config["checkpoint-dir"] or None,
        resume=config["resume"],
    )
