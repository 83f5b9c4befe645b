"""Liars speak against a split and for a merge; without liars the rule is the default one."""

import fedbranch as fb
from studies.attack_matrix.lies import Deceived, exchanged, for_a_merge
from studies.attack_matrix.methods import trained
from studies.attack_matrix.scenes import Scene, federation


def test_liars_speak_against_a_split_and_for_a_merge():
    assert exchanged((1.0, 2.0, 3.0, 4.0)) == (2.0, 1.0, 4.0, 3.0)
    assert for_a_merge((2.0, 1.0, 3.0)) == (1.0, 3.0, 3.0)


def test_a_rule_without_liars_is_the_default_one():
    scene = Scene(40, 2, 0)
    honest, _ = federation(scene)

    (truth, _), (without_lies, _) = (
        trained(scene, honest, rule=rule) for rule in (fb.AutoRule(), Deceived())
    )
    with_lies, _ = trained(scene, honest, rule=Deceived(liars=frozenset(honest)))

    assert without_lies.history == truth.history
    assert len(truth.clusters) == 2
    assert len(with_lies.clusters) == 1
