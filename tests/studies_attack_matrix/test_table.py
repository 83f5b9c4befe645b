"""The Markdown table of the matrix."""

from studies.attack_matrix.table import table


def test_the_table_has_a_row_for_every_attack_and_share():
    methods = {
        "CFL": {
            "points_lost": 1.0,
            "precision": None,
            "recall": 0.5,
            "out_by": 3,
            "share_out": 0.5,
        },
        "FedAvg": {"accuracy": 0.1, "points_lost": 50.0},
    }
    results = [
        {"cell": {"attack": attack, "percent": 25, "num_groups": 1, "seed": 0}, "methods": methods}
        for attack in ("mimic", "alie")
    ]

    rows = table(results).splitlines()

    assert rows[-3:] == [
        "|---|---|---|---|---|---|---|---|",
        "| mimic | 25 | 1.0 (1.0) | – | 0.50 (0.50) | 3 (1/1) | 0.50 (0.50) | 50.0 (50.0) |",
        "| ALIE | 25 | 1.0 (1.0) | – | 0.50 (0.50) | 3 (1/1) | 0.50 (0.50) | 50.0 (50.0) |",
    ]
