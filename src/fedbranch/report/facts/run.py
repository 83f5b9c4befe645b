"""The model of a run: what page, terminal and JSON show is computed from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fedbranch.report.facts.growth import Growth
from fedbranch.report.facts.metrics import Metric, latest, metrics_of
from fedbranch.report.facts.natural_order import natural_order
from fedbranch.report.facts.settings_in_words import METHOD_TITLES, rule_text
from fedbranch.report.load import Reading, read
from fedbranch.rules import Decision
from fedbranch.runs import Evaluation, Round, RunFolder, mean_by_metric
from fedbranch.types import JSON

__all__ = ["RunFacts", "facts_of", "read_run"]


@dataclass(frozen=True, eq=False)
class RunFacts:
    """A run and its baselines, read at one moment.

    The tree, the positions and the clusters are those after the last round of the history,
    also if the server was saved earlier.

    Attributes
    ----------
    reading
        The content of the run folder.
    baselines
        Name -> facts of each method that the run is compared with.
    """

    reading: Reading
    baselines: Mapping[str, RunFacts] = field(default_factory=dict)

    # What was run

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return self.reading.folder

    @property
    def history(self) -> list[Round]:
        """All rounds."""
        return self.reading.history

    @property
    def about(self) -> JSON:
        """The content of ``run.json``."""
        return self.folder.about

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.folder.method

    @property
    def title(self) -> str:
        """The name of the method as people write it."""
        return METHOD_TITLES.get(self.method, self.method)

    @property
    def rule(self) -> str:
        """The rule that splits clusters, as in Python."""
        return rule_text(self.about.get("rule"))

    # How far it is

    @property
    def expected_baselines(self) -> set[str]:
        """The baselines that the experiment names."""
        named = (self.about.get("about") or {}).get("experiment", {}).get("baselines", [])
        return set(named) if self.method == "cfl" else set()

    @property
    def missing_baselines(self) -> set[str]:
        """The expected baselines that are not complete."""
        complete = {name for name, run in self.baselines.items() if run.folder.is_complete}
        return self.expected_baselines - complete

    @property
    def is_complete(self) -> bool:
        """Return whether the run and all its expected baselines have ended."""
        return self.folder.is_complete and not self.missing_baselines

    # Clients

    @cached_property
    def names(self) -> dict[str, str]:
        """Client id -> what people call it, where they call it something else."""
        return self.folder.names

    @cached_property
    def true_groups(self) -> dict[str, str]:
        """Client id -> its true group, where that is known."""
        return {i: group for i, group in self.folder.groups.items() if group is not None}

    @cached_property
    def all_client_ids(self) -> list[str]:
        """All clients that there ever were: in the order of ``run.json``, then by name."""
        described = [str(client["id"]) for client in self.about["clients"]]
        met: set[str] = {*self.names, *self.growth.positions}
        for entry in self.history:
            met.update(entry.record.joined, entry.record.metrics, entry.evaluation)
            for decision in entry.record.splits:
                met.update(*decision.groups)
        return described + sorted(met.difference(described), key=natural_order)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Client id -> its place in :attr:`all_client_ids`."""
        return {client_id: index for index, client_id in enumerate(self.all_client_ids)}

    # The tree after the last round

    @cached_property
    def growth(self) -> Growth:
        """The nodes, and the positions of the clients that have not left."""
        saved = self.reading.saved
        if saved is not None and not self.history:
            return Growth.of_tree(saved.tree)
        growth = Growth()
        for entry in self.history:
            growth.follow(entry.record)
        return growth

    @cached_property
    def clients_at(self) -> dict[int, list[str]]:
        """Node -> the clients at or below it, sorted."""
        return self.growth.clients_at()

    @property
    def known_client_ids(self) -> list[str]:
        """The clients that have not left, sorted."""
        return self.clients_at[0]

    @property
    def clusters(self) -> dict[int, list[str]]:
        """Leaf -> its clients, sorted."""
        return {leaf_id: self.clients_at[leaf_id] for leaf_id in self.growth.leaf_ids}

    @cached_property
    def leaf_of(self) -> dict[str, int]:
        """Client id -> its leaf. Clients on the way down the tree are absent."""
        return {i: leaf_id for leaf_id, ids in self.clusters.items() for i in ids}

    @property
    def num_clusters(self) -> int:
        """The number of clusters that have clients, after the last round."""
        sizes = self.history[-1].record.cluster_sizes if self.history else {}
        return sum(size > 0 for size in sizes.values())

    def groups_at(self, node_id: int) -> Counter[str]:
        """Count the clients of each true group at or below a node."""
        return Counter(
            self.true_groups[i] for i in self.clients_at[node_id] if i in self.true_groups
        )

    @property
    def finds_true_groups(self) -> bool | None:
        """Return whether the clusters are exactly the true groups; None if those are unknown."""
        client_ids = self.known_client_ids
        if not client_ids or any(client_id not in self.true_groups for client_id in client_ids):
            return None
        found = {frozenset(ids) for ids in self.clusters.values()}
        by_group: dict[str, set[str]] = {}
        for client_id in client_ids:
            by_group.setdefault(self.true_groups[client_id], set()).add(client_id)
        return found - {frozenset()} == {frozenset(ids) for ids in by_group.values()}

    # Decisions

    @property
    def splits(self) -> list[Decision]:
        """Every split, in order."""
        return [decision for entry in self.history for decision in entry.record.splits]

    @property
    def examinations(self) -> list[Decision]:
        """Every decision for which a cluster was examined, in order."""
        return [
            decision
            for entry in self.history
            for decision in entry.record.decisions
            if decision.is_examination
        ]

    @property
    def last_decisions(self) -> list[Decision]:
        """The last examination of each cluster that is a leaf: why it was not split.

        For a cluster that was never examined, the last decision.
        """
        latest_of: dict[int, Decision] = {}
        for entry in self.history:
            for decision in entry.record.decisions:
                known = latest_of.get(decision.node_id)
                if decision.is_examination or known is None or not known.is_examination:
                    latest_of[decision.node_id] = decision
        return [latest_of[leaf_id] for leaf_id in self.growth.leaf_ids if leaf_id in latest_of]

    @property
    def refused(self) -> Counter[str]:
        """Client id -> number of its replies that were refused."""
        return Counter(client_id for entry in self.history for client_id in entry.record.refused)

    # Metrics

    @cached_property
    def in_training(self) -> bool:
        """Return whether the metrics are those of training: nothing was evaluated otherwise."""
        return not any(entry.evaluation for entry in self.history)

    @cached_property
    def metrics(self) -> list[Metric]:
        """The metrics, the main one first."""
        return metrics_of(self.history, in_training=self.in_training)

    @cached_property
    def last(self) -> dict[str, dict[str, float]]:
        """Metric -> client id -> its last known value, also of clients that have left."""
        return latest(self.history, self.metrics, in_training=self.in_training)

    @cached_property
    def final_evaluation(self) -> Evaluation:
        """The last evaluation on held-out data; empty if there was none."""
        evaluations = [entry.evaluation for entry in self.history if entry.evaluation]
        return evaluations[-1] if evaluations else {}

    @cached_property
    def final_by_method(self) -> dict[str, Evaluation]:
        """Method -> its last evaluation: the run itself, then its complete baselines."""
        complete = {name: run for name, run in self.baselines.items() if run.folder.is_complete}
        return {self.method: self.final_evaluation} | {
            name: run.final_evaluation for name, run in complete.items()
        }

    @property
    def main_metric(self) -> str:
        """The metric that the terminal shows: the first that is not a loss, or else the first."""
        names = [name for metrics in self.final_evaluation.values() for name in metrics]
        return next(
            (name for name in names if "loss" not in name.lower()), next(iter(names), "loss")
        )

    def mean(self, method: str, client_ids: list[str]) -> float | None:
        """Average the main metric of the last evaluation over clients, under a method."""
        return mean_by_metric(self.final_by_method[method], client_ids).get(self.main_metric)


def read_run(folder: RunFolder) -> RunFacts:
    """Read a run folder and the folders of its baselines.

    Raises
    ------
    DamagedFile
        If a file of one of them is damaged.
    """
    baselines = {name: facts_of(read(baseline)) for name, baseline in folder.baselines.items()}
    return facts_of(read(folder), baselines)


def facts_of(reading: Reading, baselines: Mapping[str, RunFacts] | None = None) -> RunFacts:
    """Return the facts of a run that was read already."""
    return RunFacts(reading, baselines or {})
