"""Results: the same bytes for the same seed; the committed ones are those of the code."""

import json
from pathlib import Path

import pytest

from fedbranch.errors import FedbranchError
from studies import privacy_audit
from studies.privacy_audit.views import VIEWS

RESULTS = Path(__file__).parents[2] / "docs" / "privacy-leaks.json"

# "matching", the searches and the clumps take long, and are not measured again.
MEASURED_AGAIN = [
    "dense", "dense-8", "cosines", "cosines-label", "signs", "statistics", "norm", "norm-8",
    "values", "values-8", "pixel-counts", "loss", "angles", "angles-noise", "pairs-8",
    "known-labels", "linked", "words",
]  # fmt: skip


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    sizes = privacy_audit.Sizes(victims=12, sought=2, steps=5, crowd=80)
    for name in ("a", "b"):
        results = privacy_audit.audit(seed=1, sizes=sizes, only=["dense", "matching", "angles"])
        results.save(tmp_path / name)

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert privacy_audit.Results.load(tmp_path / "a").rows[0][1]["none"].word == "all"


def test_another_file_is_refused(tmp_path):
    (tmp_path / "other.json").write_text("{}")

    with pytest.raises(FedbranchError, match="no audit results in format 1"):
        privacy_audit.Results.load(tmp_path / "other.json")


def test_unknown_attacks_are_refused():
    with pytest.raises(ValueError, match=r"no attacks \['guess'\]; there are \['dense'"):
        privacy_audit.audit(only=["guess", "dense"])


def test_the_committed_results_have_all_attacks_at_full_size(committed):
    assert list(committed.measured) == [attack.key for attack in privacy_audit.ATTACKS]
    assert committed.sizes == privacy_audit.Sizes()
    assert all(set(by_view) == set(VIEWS) for by_view in committed.measured.values())


def test_the_committed_texts_and_words_are_those_of_the_code(committed):
    assert json.loads(RESULTS.read_text()) == committed.to_json()


def test_the_committed_controls_worked(committed):
    assert committed.measured["dense"]["none"].low >= 60
    assert committed.measured["signs"]["none"].value == 1


@pytest.mark.slow
def test_the_committed_conclusions_hold_on_other_digits_models_and_secrets(committed):
    sizes = privacy_audit.Sizes(victims=60, batches=30, crowd=200, writers=60)

    again = privacy_audit.audit(seed=11, sizes=sizes, only=MEASURED_AGAIN)

    for attack, by_view in again.rows:
        for view, measured in by_view.items():
            before = committed.measured[attack.key][view].word
            # What is a hint in one scene may be chance, or a leak, in another.
            if "hints" not in (before, measured.word):
                chances = [word == "chance" for word in (before, measured.word)]
                assert chances[0] == chances[1], (attack.key, view, before, measured)
