"""A real deployment with hidden models: the SuperLink keeps every message, and all are searched."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fedbranch.privacy import Identity, Secret
from fedbranch.runs import RunFolder
from flower.deployment import Deployment, wait_for
from flower.wire_scan import Overheard

APP = Path(__file__).parents[3] / "examples" / "flower_app"
NUM_NODES, NUM_ROUNDS = 3, 2

pytestmark = pytest.mark.deployment

CLIENT = """
from pathlib import Path

import numpy as np

from fedbranch.flower import AgreementMod, transform_mod
from fedbranch.privacy import Identity, Roster

FOLDER = Path({folder!r})


def identity(context):
    return Identity.from_pem((FOLDER / f"{{context.node_config['partition-id']}}.pem").read_bytes())


def roster(context):
    return Roster("deployed", (FOLDER / "roster").read_text().split())


def initial(seed):
    rng = np.random.default_rng(seed)
    return {{
        name: rng.normal(scale=0.01, size=array.shape).astype(np.float32)
        for name, array in task.initial_model().items()
    }}


def watch(name):
    def mod(message, context, call_next):
        for record in message.content.array_records.values():
            for number, array in enumerate(record.to_numpy_ndarrays()):
                np.save(FOLDER / name / f"{{message.metadata.message_id}}-{{number}}", array)
        return call_next(message, context)

    return mod


def shown_secret(context):
    (FOLDER / "key").write_bytes(agreement.secret(context).key)
    return agreement.secret(context)


agreement = AgreementMod(identity, roster, FOLDER)
app = ClientApp(mods=[watch("came"), transform_mod(shown_secret, initial), watch("seen")])
app.query("fedbranch")(agreement)
"""

SERVER = """
from fedbranch.flower import ClusteredStrategy, agree, hidden_arrays
from flwr.serverapp import ServerApp
from swapped_digits import task

app = ServerApp()


@app.main()
def main(grid, context):
    agreed = agree(grid, min_nodes={num_nodes}, timeout=400)
    arrays = hidden_arrays(task.initial_model(), fingerprint=agreed.fingerprint)
    strategy = ClusteredStrategy(
        fraction_evaluate=0.0,
        min_evaluate_nodes=0,
        min_available_nodes={num_nodes},
        checkpoint_dir=context.run_config["checkpoint-dir"],
    )
    strategy.start(grid, arrays, num_rounds={num_rounds}, timeout=100)
"""


def make_app(folder, private):
    """The example with a client app that hides its model, and a server app that does not know it."""
    app = shutil.copytree(APP, folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
    package = app / "swapped_digits"
    client = (package / "client_app.py").read_text()
    hidden = CLIENT.format(folder=str(private))
    (package / "client_app.py").write_text(client.replace("app = ClientApp()\n", hidden))
    (package / "server_app.py").write_text(
        SERVER.format(num_nodes=NUM_NODES, num_rounds=NUM_ROUNDS)
    )
    return app


def test_the_superlink_sees_no_plain_model(tmp_path):
    private = tmp_path / "private"
    for name in ("came", "seen"):
        (private / name).mkdir(parents=True)
    identities = [Identity.new() for _ in range(NUM_NODES)]
    for i, identity in enumerate(identities):
        (private / f"{i}.pem").write_bytes(identity.to_pem())
    (private / "roster").write_text("\n".join(one.fingerprint for one in identities))
    link = tmp_path / "deployment"
    link.mkdir()
    with Deployment(link) as deployment:
        try:
            deployment.start_superlink()
            for partition in range(NUM_NODES):
                deployment.register(partition)
                deployment.start_node(partition, NUM_NODES)
            wait_for(
                lambda: all(map(deployment.is_connected, range(NUM_NODES))), 120, "the SuperNodes"
            )
            run = deployment.run(
                make_app(tmp_path, private), checkpoint_dir=str(tmp_path / "run"), num_groups=1
            )
            wait_for((tmp_path / "run" / "summary.json").exists, 400, "the last round")
            wait_for(lambda: deployment.status(run).startswith("finished"), 60, "its status")
            assert deployment.status(run) == "finished:completed"
        except Exception:
            print(deployment.logs())
            raise
    folder = RunFolder(tmp_path / "run")

    assert folder.is_complete
    assert [len(entry.record.metrics) for entry in folder.history()] == [NUM_NODES] * NUM_ROUNDS
    seen = [np.load(path) for path in (private / "seen").iterdir()]
    assert len(seen) == 2 * NUM_NODES * NUM_ROUNDS
    overheard = Overheard()
    paths = [path for place in (link, tmp_path / "run") for path in place.rglob("*")]
    overheard.add(*(path.read_bytes() for path in paths if path.is_file()))
    assert overheard.num_plain_runs(seen) == 0
    assert not overheard.holds_key(Secret((private / "key").read_bytes(), "deployed"))
    # The scan would have found it: what came to the nodes is in the SuperLink's files.
    came = [np.load(path) for path in (private / "came").iterdir()]
    assert overheard.num_plain_runs(came) > 500
