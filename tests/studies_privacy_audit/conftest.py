"""The committed results, a small scene, and the attacks by key."""

from pathlib import Path

import pytest

from studies import privacy_audit
from studies.privacy_audit.scene import Scene, Sizes

RESULTS = Path(__file__).parents[2] / "docs" / "privacy-leaks.json"


@pytest.fixture(scope="module")
def committed():
    return privacy_audit.Results.load(RESULTS)


@pytest.fixture(scope="module")
def scene():
    sizes = Sizes(victims=40, batches=20, sought=6, steps=200, crowd=400, writers=90)
    return Scene(seed=5, sizes=sizes)


@pytest.fixture(scope="module")
def by_key():
    return {attack.key: attack for attack in privacy_audit.ATTACKS}
