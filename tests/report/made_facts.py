"""Facts by the page's contract, of runs that never were: any number of clients and clusters."""

from base64 import b64encode

import numpy as np

METRICS = [
    {"name": "accuracy", "is_better": "higher", "is_log": False},
    {"name": "loss", "is_better": "lower", "is_log": True},
]


def made_facts(**changes):
    """One run, without comparison; see :func:`made_run`."""
    return {"schema": 1, "fedbranch": "0.1.0", "runs": [made_run(**changes)], "comparison": None}


def made_run(
    *, name="made-1", num_clients=20, num_leaves=4, rounds=40, split_every=10, ids=None, seed=0
):
    """A run whose clusters split in two, the largest first, until there are enough."""
    rng = np.random.default_rng(seed)
    ids = ids or [f"client-{i}" for i in range(num_clients)]
    nodes = made_nodes(num_clients, num_leaves, split_every)
    leaf = np.zeros(num_clients, int)
    for node in nodes:
        if not node["children"]:
            leaf[node["clients"]] = node["id"]
    groups = {node: str(i) for i, node in enumerate(sorted(set(leaf.tolist())))}
    group = [groups[node] for node in leaf.tolist()]
    plain = {"accuracy": rng.uniform(0.6, 0.8, num_clients).round(4).tolist()}
    last = {"accuracy": rng.uniform(0.9, 0.99, num_clients).round(4).tolist()}
    plain["loss"] = [round(2 * (1 - value), 4) for value in plain["accuracy"]]
    last["loss"] = [round(1 - value, 4) for value in last["accuracy"]]
    for node in nodes:
        of_node = node["clients"]
        node["last"] = {m: round(float(np.mean(np.take(v, of_node))), 4) for m, v in last.items()}
        node["plain"] = {m: round(float(np.mean(np.take(v, of_node))), 4) for m, v in plain.items()}
        node["groups"] = {
            g: n for g in groups.values() if (n := sum(group[i] == g for i in of_node))
        }
    evaluated = list(range(1, rounds + 1))
    leaves = sorted(groups)
    return {
        "name": name,
        "method": "cfl",
        "title": "CFL",
        "driver": "simulator",
        "seed": seed,
        "rule": "AutoRule()",
        "about": [
            ["clients", f"{num_clients:,}"],
            ["parameters", "2,410"],
            ["engine", "vectorised"],
        ],
        "rounds_done": rounds,
        "rounds_planned": rounds,
        "is_complete": True,
        "how_to_go_on": None,
        "measured_on": "held-out data",
        "metrics": METRICS,
        "clients": {
            "ids": ids,
            "names": [None] * num_clients,
            "leaf": leaf.tolist(),
            "examples": rng.integers(20, 200, num_clients).tolist(),
            "group": group,
            "joined": [None] * num_clients,
            "left": [None] * num_clients,
            "refused": [7 if i == 1 else 0 for i in range(num_clients)],
            "refusals": [
                [[3, "its update contains NaN"], [4, f"{ids[1]} is too long"]] if i == 1 else []
                for i in range(num_clients)
            ],
            "last": last,
            "plain": plain,
        },
        "nodes": nodes,
        "decisions": made_decisions(nodes, rounds),
        "series": made_series(nodes, evaluated, num_clients, rng),
        "norms": made_norms(nodes, rounds),
        "similarities": [made_similarity(nodes, node, rng) for node in nodes if node["children"]],
        "truth": {
            "ari": 1.0,
            "groups": [groups[node] for node in leaves],
            "leaves": leaves,
            "counts": [
                [
                    int((leaf == node).sum()) if row == column else 0
                    for column, node in enumerate(leaves)
                ]
                for row in range(len(leaves))
            ],
        },
        "news": [[5, f"{ids[0]} joined"], [9, f"{ids[-1]} left"]],
    }


def made_nodes(num_clients, num_leaves, split_every):
    nodes = [made_node(0, None, 0, list(range(num_clients)))]
    while sum(not node["children"] for node in nodes) < num_leaves:
        node = max((n for n in nodes if not n["children"]), key=lambda n: n["num_clients"])
        half = len(node["clients"]) // 2
        number = 1 + sum(n["split_in_round"] is not None for n in nodes)
        node["split_in_round"] = max(node["born"] + 1, number * split_every)
        for part in (node["clients"][:half], node["clients"][half:]):
            node["children"].append(len(nodes))
            nodes.append(made_node(len(nodes), node["id"], node["split_in_round"], part))
    return nodes


def made_node(node_id, parent, born, clients):
    return {
        "id": node_id,
        "parent": parent,
        "children": [],
        "born": born,
        "split_in_round": None,
        "num_clients": len(clients),
        "clients": clients,
    }


def made_decisions(nodes, rounds):
    return [
        {
            "node": node["id"],
            "first_round": node["born"] + 1,
            "round": node["split_in_round"] or rounds,
            "verdict": "split" if node["children"] else "train",
            "title": "splits" if node["children"] else "trains on",
            "reason": "two groups, confirmed by the other half"
            if node["children"]
            else "no groups",
            "measured": [f"{node['num_clients']} clients answered", "the best cut has 2 groups"],
            "children": node["children"],
            "moves": [],
        }
        for node in nodes
    ]


def made_series(nodes, evaluated, num_clients, rng):
    def curve(rounds, ceiling):
        return [round(ceiling * (1 - 0.8 * 0.9**r), 4) for r in rounds]

    by_node = {}
    for node in nodes:
        rounds = [r for r in evaluated if node["born"] < r <= (node["split_in_round"] or 10**9)]
        if not rounds:
            continue
        values = curve(rounds, 0.75 + 0.2 * (node["parent"] is not None) - 0.002 * node["id"])
        by_node[str(node["id"])] = {
            "first": evaluated.index(rounds[0]),
            "mean": values,
            "low": [round(v - 0.05, 4) for v in values],
            "high": [round(min(1, v + 0.03), 4) for v in values],
        }
    losses = {
        node: {
            "first": s["first"],
            "mean": [round(1.01 - v, 4) for v in s["mean"]],
            "low": [round(1.01 - v, 4) for v in s["high"]],
            "high": [round(1.01 - v, 4) for v in s["low"]],
        }
        for node, s in by_node.items()
    }
    clients = None
    if num_clients <= 100:
        ceilings = rng.uniform(0.85, 0.99, num_clients)
        clients = {"accuracy": [curve(evaluated, float(c)) for c in ceilings]}
        clients["loss"] = [[round(1.01 - v, 4) for v in row] for row in clients["accuracy"]]
    plain = curve(evaluated, 0.76)
    overall = curve(evaluated, 0.9)
    return {
        "rounds": evaluated,
        "num_clusters": [
            sum(node["born"] < r <= (node["split_in_round"] or 10**9) for node in nodes)
            for r in evaluated
        ],
        "overall": {"accuracy": overall, "loss": [round(1.01 - v, 4) for v in overall]},
        "nodes": {"accuracy": by_node, "loss": losses},
        "clients": clients,
        "plain": {
            "rounds": evaluated,
            "nodes": {
                "accuracy": {str(node["id"]): plain for node in nodes},
                "loss": {str(node["id"]): [round(1.01 - v, 4) for v in plain] for node in nodes},
            },
        },
    }


def made_norms(nodes, rounds):
    norms = {}
    for node in nodes:
        own = list(range(node["born"] + 1, (node["split_in_round"] or rounds) + 1))
        norms[str(node["id"])] = {
            "rounds": own,
            "mean": [round(2 * 0.85 ** (r - node["born"]), 6) for r in own],
            "max": [round(3 * 0.95 ** (r - node["born"]), 6) for r in own],
            "gap": [round(0.5 - 1 / r, 4) if r % 3 == 0 else None for r in own],
            "cross": [round(-0.3 + 1 / r, 4) if r % 3 == 0 else None for r in own],
        }
    return norms


def made_similarity(nodes, node, rng):
    order = node["clients"]
    size = min(256, len(order))
    sides = np.concatenate([[child] * nodes[child]["num_clients"] for child in node["children"]])
    cells = sides[np.arange(size) * len(order) // size]
    cosines = np.where(cells[:, None] == cells[None, :], 0.7, -0.3)
    cosines = np.clip(cosines + rng.normal(0, 0.08, (size, size)), -1, 1)
    cosines = (cosines + cosines.T) / 2
    np.fill_diagonal(cosines, 1)
    return {
        "node": node["id"],
        "round": node["split_in_round"],
        "num_clients": len(order),
        "size": size,
        "order": order,
        "children": sides.tolist(),
        "matrix": b64encode(np.rint(127 * cosines).astype(np.int8).tobytes()).decode(),
        "gap": 0.6,
        "cross": -0.1,
    }


def made_comparison():
    rounds = list(range(1, 41))

    def curve(title, ceiling, num_runs, is_reference=False):
        values = [round(ceiling * (1 - 0.8 * 0.9**r), 4) for r in rounds]
        has_band = num_runs > 1
        return {
            "title": title,
            "num_runs": num_runs,
            "rounds": rounds,
            "mean": values,
            "low": [v - 0.02 for v in values] if has_band else None,
            "high": [v + 0.02 for v in values] if has_band else None,
            "is_reference": is_reference,
        }

    return {
        "metric": "accuracy",
        "curves": [
            curve("CFL", 0.95, 3),
            curve("IFCA (told k)", 0.9, 3),
            curve("plain FL", 0.76, 3, is_reference=True),
        ],
        "table": [
            {
                "run": f"made-{seed + 1}",
                "title": "CFL",
                "seed": seed,
                "last": {"accuracy": 0.95, "loss": 0.1},
                "worst": {"accuracy": 0.8, "loss": 0.4},
                "clusters": 4,
                "ari": 1.0,
                "rounds": 40,
            }
            for seed in range(3)
        ],
    }
