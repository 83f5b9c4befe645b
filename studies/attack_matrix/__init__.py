"""The attack matrix: what each attack costs honest clients, with clustered learning and without.

20 clients, of which 10, 25 or 40 % attack, hold the embedded digits. The honest clients form 1, 2
or 4 groups. If there are several, each group has swapped two labels. Attackers come from all
groups. The model is a small MLP, trained for 25 rounds with 3 seeds. The methods:

- CFL: the default rule and guard, without knowledge of the attack. Also with attackers that
  lie about losses.
- FedAvg, trimmed mean and Multi-Krum: one model for all clients, without a guard, with that
  aggregate. The latter two are told the number of attackers.
- CFL without the attackers, on the same honest clients: all others are compared with it.
"""

from studies.attack_matrix.attackers import ATTACKS, Attack, Attackers
from studies.attack_matrix.matrix import run_matrix
from studies.attack_matrix.scenes import Cell, Scene
from studies.attack_matrix.table import table, values

__all__ = [
    "ATTACKS",
    "Attack",
    "Attackers",
    "Cell",
    "Scene",
    "run_matrix",
    "table",
    "values",
]
