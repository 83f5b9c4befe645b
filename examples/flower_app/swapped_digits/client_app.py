"""The client app: plain Flower. It does not know that there are clusters."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from swapped_digits import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model that came on this client's examples."""
    examples, _ = load_examples(context)
    model = task.train(
        load_model(message),
        examples,
        epochs=context.run_config["local-epochs"],
        learning_rate=context.run_config["learning-rate"],
        seed=message.content["config"]["server-round"],
    )
    metrics = task.evaluate(model, examples)
    content = RecordDict(
        {
            "arrays": ArrayRecord({name: Array(array) for name, array in model.items()}),
            "metrics": MetricRecord(
                {"train-loss": metrics["loss"], "num-examples": len(examples.x)}
            ),
        }
    )
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the model that came on this client's held-out examples."""
    _, examples = load_examples(context)
    metrics = task.evaluate(load_model(message), examples)
    content = RecordDict({"metrics": MetricRecord({**metrics, "num-examples": len(examples.x)})})
    return Message(content, reply_to=message)


def load_examples(context: Context) -> tuple[task.Examples, task.Examples]:
    """Return this client's own data."""
    return task.load_client(
        context.node_config["partition-id"],
        context.node_config["num-partitions"],
        context.run_config["num-groups"],
    )


def load_model(message: Message) -> dict:
    """Unpack the model."""
    return {name: array.numpy() for name, array in message.content["arrays"].items()}
