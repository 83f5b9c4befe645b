"""Every examination in words."""

from io import StringIO

from rich.console import Console

from fedbranch import Decision
from fedbranch.report.text.why import print_why


def decision(number, reason, *, node_id=0, verdict="train", **measurements):
    return Decision(
        node_id=node_id, round=number, verdict=verdict, reason=reason, measurements=measurements
    )


def printed(decisions):
    text = StringIO()
    print_why(decisions, Console(file=text, width=500))
    return text.getvalue()


def test_every_number_is_said_in_words():
    text = printed(
        [
            decision(7, "no groups", num_groups=3, scatter=0.4, p_structure=0.02),
            decision(8, "[pays]", verdict="split", mean_gain=0.25, p_pays=1e-6),
        ]
    )

    assert "round 7, node 0 trains on: no groups" in text
    assert "the best cut has 3 groups" in text
    assert "differ by 40% of what groups differ by" in text
    assert "p = 0.02" in text
    assert "round 8, node 0 splits: [pays]" in text
    assert "lower by 0.25" in text


def test_without_examinations_it_says_so():
    assert "No cluster has been examined" in printed([])
