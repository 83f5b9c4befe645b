"""What a run came to: its clusters, its splits with their reasons, and the methods beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from fedbranch.rules import Decision
from fedbranch.runs import Evaluation, Round, RunFolder, mean_by_metric
from fedbranch.tree import ParameterTree
from fedbranch.types import JSON

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """A run and its baselines, ready to be shown.

    Attributes
    ----------
    run
        The run folder.
    tree
        As saved last.
    history
        All rounds.
    final
        Method -> client id -> metrics at the end: the run itself, then its baselines as far
        as they are complete.
    true_groups
        Client id -> its true group, for those whose group is known.
    names
        Client id -> what people call it, where they call it something else.
    """

    run: RunFolder
    tree: ParameterTree
    history: list[Round]
    final: dict[str, Evaluation]
    true_groups: dict[str, str]
    names: dict[str, str]

    @property
    def metric(self) -> str:
        """The measure to show: the first that is not a loss, or else the first."""
        names = [name for metrics in self.final[self.run.method].values() for name in metrics]
        return next(
            (name for name in names if "loss" not in name.lower()), next(iter(names), "loss")
        )

    @property
    def is_complete(self) -> bool:
        """Whether the run and all baselines that belong to it have ended."""
        return self.run.is_complete and self.expected_baselines <= self.final.keys()

    @property
    def expected_baselines(self) -> set[str]:
        """The baselines that the experiment names."""
        about = self.run.about.get("about") or {}
        named = about.get("experiment", {}).get("baselines", [])
        return set(named) if self.run.method == "cfl" else set()

    @property
    def splits(self) -> list[Decision]:
        """Every split, in order."""
        return [decision for entry in self.history for decision in entry.record.splits]

    @property
    def last_decisions(self) -> list[Decision]:
        """The last examination of each cluster that is still a leaf: why it was not split.

        Of one that was never examined, the last decision.
        """
        latest: dict[int, Decision] = {}
        for entry in self.history:
            for decision in entry.record.decisions:
                known = latest.get(decision.node_id)
                if decision.is_examination or known is None or not known.is_examination:
                    latest[decision.node_id] = decision
        return [latest[leaf.id] for leaf in self.tree.leaves if leaf.id in latest]

    @property
    def examinations(self) -> list[Decision]:
        """Every decision for which a cluster was looked at, in order."""
        return [
            decision
            for entry in self.history
            for decision in entry.record.decisions
            if decision.is_examination
        ]

    @property
    def refused(self) -> Counter[str]:
        """Client id -> how many of its replies were refused."""
        return Counter(client_id for entry in self.history for client_id in entry.record.refused)

    def groups_at(self, node_id: int) -> Counter[str]:
        """Count the clients of each true group in a cluster."""
        return Counter(
            self.true_groups[client_id]
            for client_id in self.tree.cluster(node_id)
            if client_id in self.true_groups
        )

    @property
    def finds_true_groups(self) -> bool | None:
        """Whether the leaves are exactly the true groups; None if those are not known."""
        client_ids = self.tree.client_ids
        if not client_ids or any(client_id not in self.true_groups for client_id in client_ids):
            return None
        found = {frozenset(self.tree.members(leaf.id)) for leaf in self.tree.leaves}
        by_group: dict[str, set[str]] = {}
        for client_id in client_ids:
            by_group.setdefault(self.true_groups[client_id], set()).add(client_id)
        return found - {frozenset()} == {frozenset(ids) for ids in by_group.values()}

    def mean(self, method: str, client_ids: list[str]) -> float | None:
        """Average the shown metric over clients, under a method."""
        return mean_by_metric(self.final[method], client_ids).get(self.metric)

    def to_json(self) -> JSON:
        """Give everything that the terminal shows, for machines."""
        leaves = {str(leaf.id): self.tree.members(leaf.id) for leaf in self.tree.leaves}
        return {
            "run": str(self.run.path),
            "is_complete": self.is_complete,
            "rounds": len(self.history),
            "metric": self.metric,
            "clusters": leaves,
            "names": self.names,
            "true_groups": {leaf: dict(self.groups_at(int(leaf))) for leaf in leaves},
            "tree": [
                {
                    "node_id": node.id,
                    "parent_id": node.parent_id,
                    "num_clients": len(self.tree.cluster(node.id)),
                    "split_in_round": node.split_in_round,
                }
                for node in self.tree
            ],
            "finds_true_groups": self.finds_true_groups,
            "splits": [asdict(split) for split in self.splits],
            "last_decisions": [asdict(decision) for decision in self.last_decisions],
            "refused": dict(self.refused),
            "mean": {
                method: {
                    "overall": self.mean(method, self.tree.client_ids),
                    "clusters": {leaf: self.mean(method, ids) for leaf, ids in leaves.items()},
                }
                for method in self.final
            },
        }


def compare(run: RunFolder) -> Comparison:
    """Read a run folder and those of its baselines."""
    return Comparison(
        run=run,
        tree=run.tree(),
        history=run.history(),
        final={
            run.method: run.final_evaluation(),
            **{
                name: baseline.final_evaluation()
                for name, baseline in run.baselines.items()
                if baseline.is_complete
            },
        },
        true_groups={i: group for i, group in run.groups.items() if group is not None},
        names=run.names,
    )
