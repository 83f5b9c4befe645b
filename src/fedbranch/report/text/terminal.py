"""Print a run as text: the tree of clusters, the table beside the baselines, the reasons."""

from __future__ import annotations

import re
from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from fedbranch.report.facts.growth import Branch
from fedbranch.report.facts.run import RunFacts
from fedbranch.report.facts.settings_in_words import METHOD_TITLES
from fedbranch.rules import Decision

__all__ = ["print_run"]

MAX_NAMED = 10  # clients that are named at a leaf, or as refused
MAX_REASONS = 5  # kinds of refusal that are told apart

# Baselines from weak to strong, with clustered learning beside plain FL, from which it starts.
TABLE_ORDER = ("local", "fedavg", "cfl", "ifca", "oracle")


def print_run(run: RunFacts, console: Console) -> None:
    """Print the tree, the table, the reasons, the refusals and how far the run is."""
    console.print(_cluster_tree(run))
    _print_table(run, console)
    console.print(
        _reasons("Why each cluster was split", run.splits, "No cluster was split."),
        soft_wrap=True,
    )
    console.print(
        _reasons("Why the others were not" if run.splits else "Why not", run.last_decisions, ""),
        soft_wrap=True,
    )
    if run.refused:
        console.print(_refusals(run), soft_wrap=True)
    _print_state(run, console)
    console.print(f"Run folder: {escape(str(run.folder.path))}", soft_wrap=True)


def _cluster_tree(run: RunFacts) -> Tree:
    def grow(branch: Tree, node: Branch) -> Tree:
        for child_id in node.child_ids:
            child = run.growth.nodes[child_id]
            grow(branch.add(_node_label(run, child)), child)
        return branch

    root = run.growth.nodes[0]
    return grow(Tree(_node_label(run, root)), root)


def _node_label(run: RunFacts, node: Branch) -> Text:
    client_ids = run.clients_at[node.id]
    label = Text(
        f"{'leaf' if node.is_leaf else 'node'} {node.id}",
        "bold green" if node.is_leaf else "bold",
    )
    label.append(
        f"  {len(client_ids)} client{'s' if len(client_ids) != 1 else ''}", "not bold default"
    )
    groups = run.groups_at(node.id)
    if groups:
        parts = ", ".join(f"{group} ({count})" for group, count in sorted(groups.items()))
        label.append(f" of true group{'s' if len(groups) != 1 else ''} {parts}", "not bold dim")
    if node.split_in_round is not None:
        label.append(f", split in round {node.split_in_round}", "not bold yellow")
    if node.is_leaf and client_ids:
        shown = sorted(run.names.get(i, i) for i in client_ids)[:MAX_NAMED]
        more = f", and {len(client_ids) - len(shown)} more" if len(client_ids) > MAX_NAMED else ""
        label.append(f"\n{', '.join(shown)}{more}", "not bold dim")
    return label


def _print_table(run: RunFacts, console: Console) -> None:
    if not any(run.final_by_method.values()):
        console.print("Nothing was evaluated on held-out data.")
        return
    num_evaluated = len(run.final_evaluation)
    which = (
        "clients"
        if num_evaluated == len(run.known_client_ids)
        else f"the {num_evaluated} clients that were evaluated last"
    )
    console.print(f"{run.main_metric} on held-out data, mean over {which}")
    console.print(_table(run))


def _table(run: RunFacts) -> Table:
    methods = [name for name in TABLE_ORDER if name in run.final_by_method]
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
    rows = [(f"leaf {leaf_id}", client_ids) for leaf_id, client_ids in run.clusters.items()]
    for name, client_ids in [*rows, ("all", run.known_client_ids)]:
        if name == "all":
            table.add_section()
        means = [run.mean(method, client_ids) for method in methods]
        table.add_row(name, str(len(client_ids)), *map(_shown, means))
    return table


def _reasons(title: str, decisions: list[Decision], if_none: str) -> Text:
    if not decisions:
        return Text(if_none)
    text = Text(title, "bold")
    for decision in decisions:
        text.append(f"\nround {decision.round}, node {decision.node_id}: ", "not bold yellow")
        text.append(decision.reason, "not bold default")
    return text


def _refusals(run: RunFacts) -> Text:
    """Return how many replies were refused, of which clients, and the most frequent reasons."""
    by_client = run.refused
    named = [
        f"{run.names.get(client_id, client_id)} ({count})"
        for client_id, count in by_client.most_common(MAX_NAMED)
    ]
    more = f", and {len(by_client) - MAX_NAMED} more" if len(by_client) > MAX_NAMED else ""
    text = Text(
        f"Refused {_counted(by_client.total(), 'reply', 'replies')} of "
        f"{_counted(len(by_client), 'client', 'clients')}: {', '.join(named)}{more}"
    )
    reasons = [reason for entry in run.history for reason in entry.record.refused.values()]
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


def _print_state(run: RunFacts, console: Console) -> None:
    """Print what a complete run found, or how an incomplete one goes on."""
    if not run.is_complete:
        rounds = f"{len(run.history)} of {run.about['rounds']} rounds"
        missing = ", ".join(sorted(run.missing_baselines))
        lacking = f", without the baselines {missing}" if missing else ""
        console.print(
            f"Not complete ({rounds}{lacking}); {escape(run.folder.how_to_go_on)}",
            soft_wrap=True,
        )
        return
    match run.finds_true_groups:
        case True:
            console.print("The clusters are exactly the true groups.")
        case False:
            console.print("The clusters differ from the true groups.")


def _kind(reason: str) -> str:
    """Return a reason without what differs every time: numbers and quoted texts."""
    return re.sub(r"'[^']*'|[-+\d][\w.+-]*", "", reason)


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.3g}"
