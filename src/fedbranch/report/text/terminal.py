"""A run as text: the tree of clusters, the table beside the baselines, the reasons."""

from __future__ import annotations

import re
from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from fedbranch.report.text.comparison import Comparison
from fedbranch.rules import Decision
from fedbranch.tree import Node

__all__ = ["METHOD_TITLES", "print_comparison"]

MAX_NAMED = 10  # clients that are named at a leaf, or as refused
MAX_REASONS = 5  # kinds of refusal that are told apart

METHOD_TITLES = {
    "cfl": "CFL",
    "fedavg": "plain FL",
    "local": "alone",
    "oracle": "oracle",
    "ifca": "IFCA (told k)",
}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print everything there is to see about a run."""
    console.print(_cluster_tree(comparison))
    if any(comparison.final.values()):
        evaluated = comparison.final[comparison.run.method]
        which = (
            "clients"
            if len(evaluated) == len(comparison.tree.client_ids)
            else f"the {len(evaluated)} clients that were evaluated last"
        )
        console.print(f"{comparison.metric} on held-out data, mean over {which}")
        console.print(_table(comparison))
    else:
        console.print("Nothing was evaluated on held-out data.")
    console.print(
        _reasons("Why each cluster was split", comparison.splits, "No cluster was split."),
        soft_wrap=True,
    )
    console.print(
        _reasons(
            "Why the others were not" if comparison.splits else "Why not",
            comparison.last_decisions,
            "",
        ),
        soft_wrap=True,
    )
    if comparison.refused:
        console.print(_refusals(comparison), soft_wrap=True)
    if comparison.is_complete:
        match comparison.finds_true_groups:
            case True:
                console.print("The clusters are exactly the true groups.")
            case False:
                console.print("The clusters differ from the true groups.")
    else:
        rounds = f"{len(comparison.history)} of {comparison.run.about['rounds']} rounds"
        missing = sorted(comparison.expected_baselines - comparison.final.keys())
        lacking = f", without the baselines {', '.join(missing)}" if missing else ""
        console.print(
            f"Not complete ({rounds}{lacking}); {escape(comparison.run.how_to_go_on)}",
            soft_wrap=True,
        )
    console.print(f"Run folder: {escape(str(comparison.run.path))}", soft_wrap=True)


def _cluster_tree(comparison: Comparison) -> Tree:
    def grow(branch: Tree, node: Node) -> Tree:
        for child_id in node.child_ids:
            child = comparison.tree[child_id]
            grow(branch.add(_node_label(comparison, child)), child)
        return branch

    root = comparison.tree.root
    return grow(Tree(_node_label(comparison, root)), root)


def _node_label(comparison: Comparison, node: Node) -> Text:
    client_ids = comparison.tree.cluster(node.id)
    label = Text(
        f"{'leaf' if node.is_leaf else 'node'} {node.id}",
        "bold green" if node.is_leaf else "bold",
    )
    label.append(
        f"  {len(client_ids)} client{'s' if len(client_ids) != 1 else ''}", "not bold default"
    )
    groups = comparison.groups_at(node.id)
    if groups:
        parts = ", ".join(f"{group} ({count})" for group, count in sorted(groups.items()))
        label.append(f" of true group{'s' if len(groups) != 1 else ''} {parts}", "not bold dim")
    if node.split_in_round is not None:
        label.append(f", split in round {node.split_in_round}", "not bold yellow")
    if node.is_leaf and client_ids:
        shown = sorted(comparison.names.get(i, i) for i in client_ids)[:MAX_NAMED]
        more = f", and {len(client_ids) - len(shown)} more" if len(client_ids) > MAX_NAMED else ""
        label.append(f"\n{', '.join(shown)}{more}", "not bold dim")
    return label


def _table(comparison: Comparison) -> Table:
    # Baselines from weak to strong, ours beside the one it starts from.
    order = ["local", "fedavg", "cfl", "ifca", "oracle"]
    methods = [name for name in order if name in comparison.final]
    table = Table()
    table.add_column("cluster", no_wrap=True)
    table.add_column("clients", justify="right", no_wrap=True)
    for method in methods:
        table.add_column(
            METHOD_TITLES[method],
            justify="right",
            no_wrap=True,
            min_width=5,
            style="bold" * (method == "cfl"),
        )
    rows = [
        (f"leaf {leaf.id}", comparison.tree.members(leaf.id)) for leaf in comparison.tree.leaves
    ]
    for name, client_ids in [*rows, ("all", comparison.tree.client_ids)]:
        if name == "all":
            table.add_section()
        means = [comparison.mean(method, client_ids) for method in methods]
        table.add_row(
            name,
            str(len(client_ids)),
            *map(_shown, means),
        )
    return table


def _reasons(title: str, decisions: list[Decision], if_none: str) -> Text:
    if not decisions:
        return Text(if_none)
    text = Text(title, "bold")
    for decision in decisions:
        text.append(f"\nround {decision.round}, node {decision.node_id}: ", "not bold yellow")
        text.append(decision.reason, "not bold default")
    return text


def _refusals(comparison: Comparison) -> Text:
    """Say how many replies were refused, of whom, and most often why."""
    by_client = comparison.refused
    named = [
        f"{comparison.names.get(client_id, client_id)} ({count})"
        for client_id, count in by_client.most_common(MAX_NAMED)
    ]
    more = f", and {len(by_client) - MAX_NAMED} more" if len(by_client) > MAX_NAMED else ""
    text = Text(
        f"Refused {_counted(by_client.total(), 'reply', 'replies')} of "
        f"{_counted(len(by_client), 'client', 'clients')}: {', '.join(named)}{more}"
    )
    reasons = [reason for entry in comparison.history for reason in entry.record.refused.values()]
    kinds = Counter(map(_kind, reasons))
    for kind, count in kinds.most_common(MAX_REASONS):
        example = next(reason for reason in reasons if _kind(reason) == kind)
        text.append(f"\n{count} x ", "yellow")
        text.append(example)
    if len(kinds) > MAX_REASONS:
        rest = kinds.total() - sum(count for _, count in kinds.most_common(MAX_REASONS))
        text.append(f"\n{rest} x ", "yellow")
        text.append("other reasons, all of them in history.jsonl")
    return text


def _kind(reason: str) -> str:
    """Leave out of a reason what is different every time: numbers, and what is quoted."""
    return re.sub(r"'[^']*'|[-+\d][\w.+-]*", "", reason)


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.3g}"
