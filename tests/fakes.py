"""Clients without data: each pulls towards an optimum of its own."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from fedbranch import Server, Task, Update

DIM = 20


class QuadraticClients:
    """Clients with risk ½‖θ − optimum‖², in groups whose optima lie far apart."""

    def __init__(self, num_groups: int, clients_per_group: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        centers = 5 * np.linalg.qr(rng.normal(size=(DIM, DIM)))[0][:num_groups]
        self.group_of = {f"c{i:02d}": i % num_groups for i in range(num_groups * clients_per_group)}
        self.optimum = {
            client_id: (centers[group] + 0.05 * rng.normal(size=DIM)).astype(np.float32)
            for client_id, group in self.group_of.items()
        }

    @property
    def client_ids(self) -> list[str]:
        return list(self.group_of)

    def update(self, client_id: str, task: Task) -> Update:
        vector = np.float32(0.5) * (self.optimum[client_id] - task.params)
        return Update(vector, num_examples=10, base=task.base)

    def play_round(self, server: Server, client_ids: list[str]):
        tasks = server.plan(client_ids)
        return server.step({i: self.update(i, task) for i, task in tasks.items()})

    def groups(self, client_ids: list[str]) -> set[int]:
        return {self.group_of[client_id] for client_id in client_ids}

    def are_separated(self, server: Server) -> bool:
        """Whether every leaf with clients is exactly one group, and nobody is elsewhere."""
        clusters = [ids for ids in server.clusters.values() if ids]
        placed = sorted(client_id for ids in clusters for client_id in ids)
        by_group = [self.groups(ids) for ids in clusters]
        return (
            placed == server.tree.client_ids
            and all(len(groups) == 1 for groups in by_group)
            and len(by_group) == len(set().union(*by_group))
        )


def fingerprint(server: Server) -> str:
    """A digest of everything that a server would save."""
    state, files = server.to_state()
    digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
    for file_name, tensors in sorted(files.items()):
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{file_name}/{name}/{tensor.dtype}/{tensor.shape}".encode())
            digest.update(tensor.tobytes())
    return digest.hexdigest()
