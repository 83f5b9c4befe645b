"""Rules survive a checkpoint."""

import pytest

from fedbranch import (
    AutoRule,
    DamagedFile,
    NeverSplit,
    Thresholds,
)
from fedbranch.rules import rule_from_state, rule_to_state


def test_the_settings_of_a_rule_survive_a_checkpoint():
    rule = AutoRule(only_conflicts=True, coverage=0.5, review_after=(3,))

    assert rule_from_state(rule_to_state(rule)) == rule


RULE = Thresholds(eps_mean=0.4, eps_max=1.6, gamma_max=0.5)


@pytest.mark.parametrize("rule", [RULE, NeverSplit()])
def test_a_rule_survives_being_saved(rule):
    assert rule_from_state(rule_to_state(rule)) == rule


def test_a_users_own_rule_must_be_passed_again():
    class Mine:
        def examine(self, evidence):
            raise AssertionError

    with pytest.raises(DamagedFile, match="'Mine' is not part of fedbranch"):
        rule_from_state(rule_to_state(Mine()))
