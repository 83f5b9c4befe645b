"""The clients of a scene."""

from studies.attack_matrix.scenes import Scene, federation


def test_a_federation_has_as_many_of_each_group_among_honest_and_hostile():
    honest, hostile = federation(Scene(40, 4, 0))

    assert sorted(client.group for client in honest.values()) == sorted("0123" * 3)
    assert sorted(client.group for client in hostile.values()) == sorted("0123" * 2)
    assert max(honest) < min(hostile)
