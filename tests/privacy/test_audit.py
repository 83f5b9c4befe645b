"""The attacks work where nothing is hidden, and the documents say what they measure."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import beta
from torch import nn

from fedbranch.errors import FedbranchError
from fedbranch.privacy import audit as audits
from fedbranch.privacy.audit import candidates, inversion, labels, pairs, reuse, words
from fedbranch.privacy.audit.measures import Measured, of_hits, of_images, psnr
from fedbranch.privacy.audit.table import END, START
from fedbranch.privacy.audit.victims import Digits, Network, Victims, layers, split_digits
from fedbranch.privacy.audit.views import VIEWS, seen_apart, seen_together

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "privacy-leaks.json"
PAGE = ROOT / "docs" / "privacy.md"
ORTHONORMAL = ["none", "permutation", "rotation", "signs"]


@pytest.fixture(scope="module")
def committed():
    return audits.Results.load(RESULTS)


@pytest.fixture(scope="module")
def scene():
    sizes = audits.Sizes(victims=40, batches=20, sought=6, steps=200, crowd=400, writers=90)
    return audits.Scene(seed=5, sizes=sizes)


@pytest.fixture(scope="module")
def by_key():
    return {attack.key: attack for attack in audits.ATTACKS}


# Measures


def test_psnr_by_hand():
    # Errors of 0.1 and 0.3 have the mean square 0.05: -10 log10(0.05) = 13.0103.
    assert psnr(np.array([0.1, 0.7]), np.array([0.0, 1.0])) == pytest.approx(13.0103, abs=1e-4)
    assert psnr(np.array([2.0]), np.array([1.0])) == 120  # brighter than white is white


def test_guesses_of_a_batch_may_come_in_any_order():
    images = np.random.default_rng(0).random((3, 4, 64))

    measured = of_images(images[:, ::-1], images, images.mean((0, 1)))

    assert (measured.value, measured.trials, measured.word) == (120, 12, "all")


def test_the_mean_image_is_chance():
    images = np.random.default_rng(0).random((30, 1, 64))
    mean = images.mean((0, 1))

    measured = of_images(np.broadcast_to(mean, images.shape), images, mean)

    assert measured.word == "chance"
    assert measured.value == measured.chance


@pytest.mark.parametrize("hits", [0, 3, 50, 100])
def test_intervals_are_those_of_clopper_and_pearson(hits):
    measured = of_hits(np.arange(100) < hits, chance=0.1)

    low = beta.ppf(0.005, hits, 101 - hits) if hits else 0
    high = beta.ppf(0.995, hits + 1, 100 - hits) if hits < 100 else 1
    assert (measured.low, measured.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("value", "low", "chance", "word"),
    [
        (1.0, 0.9, 0.1, "all"),
        (0.5, 0.4, 0.1, "leaks"),
        (0.15, 0.11, 0.1, "hints"),
        (0.15, 0.09, 0.1, "chance"),
        (0.9, 0.8, 0.6, "leaks"),
        (0.7, 0.65, 0.6, "hints"),
    ],
)
def test_words_for_rates(value, low, chance, word):
    measured = Measured(unit="rate", value=value, low=low, high=1, chance=chance, trials=9)

    assert measured.word == word


# The scene


@pytest.mark.parametrize("per_client", [1, 8])
def test_gradients_in_closed_form_are_what_clients_send(per_client):
    held, _ = split_digits(0)
    network = Network.drawn(1)

    victims = Victims.training(network, held[:16], per_client)

    np.testing.assert_allclose(
        victims.gradients, network.gradients_of(held[:16], per_client), atol=2e-6
    )
    np.testing.assert_allclose(victims.losses, network.losses_of(held[:16], per_client), atol=1e-5)


def test_gradients_in_closed_form_are_those_of_autograd():
    held, _ = split_digits(0)
    network = Network.drawn(1)
    params = network.params.clone().requires_grad_()
    weights, biases, last_weights, last_biases = layers(params)
    hidden = torch.tanh(torch.from_numpy(held.images[:1]) @ weights.T + biases)
    outputs = hidden @ last_weights.T + last_biases
    nn.functional.cross_entropy(outputs, torch.from_numpy(held.labels[:1])).backward()

    np.testing.assert_allclose(network.gradients_of(held[:1])[0], params.grad, atol=1e-6)


def test_the_server_has_no_digit_of_a_client():
    held, public = split_digits(0)

    assert len(held) + len(public) == 1797
    assert not {i.tobytes() for i in held.images} & {i.tobytes() for i in public.images}


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_keeps_norms_and_angles(view):
    plain = np.random.default_rng(0).normal(size=(5, 97)).astype(np.float32)

    seen = seen_together(view, plain, seed=0)

    np.testing.assert_allclose(seen @ seen.T, plain @ plain.T, rtol=1e-4, atol=1e-4)


def test_runs_apart_have_different_secrets():
    plain = np.random.default_rng(0).normal(size=(1, 97)).astype(np.float32).repeat(2, axis=0)

    apart = seen_apart("rotation", plain, seed=0)
    together = seen_together("rotation", plain, seed=0)

    assert np.abs(apart[0] - apart[1]).max() > 0.1
    np.testing.assert_array_equal(together[0], together[1])


# The attacks work: the positive control, without which "chance" would mean nothing


def test_without_a_transform_images_and_labels_come_back(scene, by_key):
    assert by_key["dense"].run(scene, "none").value >= 60
    assert by_key["signs"].run(scene, "none").value == 1
    assert by_key["signs-8"].run(scene, "none").value == 1
    assert by_key["matching"].run(scene, "none").value >= 25
    assert by_key["words"].run(scene, "none").value == 1


@pytest.mark.parametrize("key", ["dense", "signs", "values", "cosines", "words", "pairs-1"])
def test_one_colluding_client_ends_all(scene, by_key, key):
    assert by_key[key].run(scene, "collusion").word == "all"


@pytest.mark.parametrize("key", ["cosines", "cosines-label"])
def test_secret_signs_alone_hide_nothing(scene, by_key, key):
    # Why that transform is not shipped.
    assert by_key[key].run(scene, "signs").word == "all"
    assert by_key[key].run(scene, "rotation").word == "chance"


@pytest.mark.parametrize("key", ["dense", "signs", "values", "pixel-counts"])
def test_one_update_under_a_rotation_says_neither_image_nor_label(scene, by_key, key):
    assert by_key[key].run(scene, "rotation").word == "chance"


@pytest.mark.parametrize("key", ["statistics", "values", "pixel-counts", "pixels", "known-texts"])
def test_the_values_of_a_permuted_update_say_it(scene, by_key, key):
    assert by_key[key].run(scene, "permutation").word in {"leaks", "all"}


@pytest.mark.parametrize("key", ["norm", "norm-8", "angles", "angles-noise", "known-labels"])
@pytest.mark.parametrize("view", ORTHONORMAL)
def test_lengths_and_angles_identify_under_every_transform(scene, by_key, view, key):
    assert by_key[key].run(scene, view).value >= 0.8


def test_pairs_reveal_a_permutation_at_once_and_a_rotation_only_within_their_span():
    plain = np.random.default_rng(0).normal(size=(12, 60)).astype(np.float32)
    in_the_span = plain[:10].T @ np.arange(10, dtype=np.float32)
    plain = np.vstack([plain, in_the_span])
    for view, num_pairs, found in [("permutation", 1, True), ("rotation", 10, False)]:
        seen = seen_together(view, plain, seed=3)
        revealed = pairs.revealed(seen[10:], seen[:num_pairs], plain[:num_pairs])
        errors = np.linalg.norm(revealed - plain[10:], axis=1) / np.linalg.norm(plain[10:], axis=1)
        assert (errors[:2] < 1e-4).all() == found
        assert errors[2] < 1e-4


def test_a_dense_layer_of_known_numbers_is_inverted():
    image = np.linspace(0, 1, 64, dtype=np.float32)
    deltas = np.linspace(-1, 1, 32, dtype=np.float32)
    update = np.concatenate([np.outer(deltas, image).ravel(), deltas, np.zeros(330, np.float32)])

    np.testing.assert_allclose(inversion.inverted(update[None])[0, 0], image, atol=1e-6)


def test_pixels_are_counted_from_values_in_any_order():
    held, _ = split_digits(0)
    gradients = Network.drawn(1).gradients_of(held[:3])
    shuffled = np.random.default_rng(0).permuted(gradients, axis=1)

    counted = candidates.pixel_counts(shuffled)

    for counts, image in zip(counted, held.images[:3], strict=True):
        true = np.bincount(np.rint(image * 16).astype(int), minlength=17)[1:]
        assert np.abs(counts - true).sum() <= 4  # a few values are near others by chance


def test_zero_groups_are_places_that_are_zero_together():
    used = np.array([[1, 1, 0, 0, 1], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1.0]])

    groups = reuse.zero_groups(used, least=2)

    assert sorted(map(tuple, groups)) == [(0, 1), (2, 3)]  # the last is never zero


def test_statistics_do_not_depend_on_the_order():
    rows = np.random.default_rng(0).normal(size=(3, 500))
    shuffled = np.random.default_rng(1).permuted(rows, axis=1)

    np.testing.assert_allclose(labels.value_statistics(shuffled), labels.value_statistics(rows))


def test_a_writer_moves_the_rows_of_its_words_only():
    writers = words.Writers.training(3, seed=0)
    rows = writers.updates[:, : words.NUM_WORDS * words.DIM].reshape(3, words.NUM_WORDS, words.DIM)

    np.testing.assert_array_equal(np.abs(rows).max(2) > 0, writers.has_word)


# Results


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    sizes = audits.Sizes(victims=12, sought=2, steps=5, crowd=80)
    for name in ("a", "b"):
        audits.audit(seed=1, sizes=sizes, only=["dense", "matching", "angles"]).save(
            tmp_path / name
        )

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert audits.Results.load(tmp_path / "a").rows[0][1]["none"].word == "all"


def test_another_file_is_refused(tmp_path):
    (tmp_path / "other.json").write_text("{}")

    with pytest.raises(FedbranchError, match="no results of an audit in format 1"):
        audits.Results.load(tmp_path / "other.json")


def test_unknown_attacks_are_refused():
    with pytest.raises(ValueError, match=r"no attacks \['guess'\]; there are \['dense'"):
        audits.audit(only=["guess", "dense"])


def test_the_committed_results_have_every_attack_at_full_size(committed):
    assert list(committed.measured) == [attack.key for attack in audits.ATTACKS]
    assert committed.sizes == audits.Sizes()
    assert all(set(by_view) == set(VIEWS) for by_view in committed.measured.values())


def test_the_committed_texts_and_words_are_those_of_the_code(committed):
    assert json.loads(RESULTS.read_text()) == committed.to_json()


def test_the_committed_controls_worked(committed):
    assert committed.measured["dense"]["none"].low >= 60
    assert committed.measured["signs"]["none"].value == 1


def test_the_page_has_the_table_of_the_committed_results(committed):
    page = PAGE.read_text()

    # To make it so: PAGE.write_text(audits.with_table(PAGE.read_text(), Results.load(RESULTS)))
    assert page == audits.with_table(page, committed)


def test_a_page_without_a_place_for_the_table_is_refused(committed):
    with pytest.raises(ValueError, match="no place between"):
        audits.with_table("nothing", committed)


def test_a_table_replaces_the_one_before(committed):
    page = f"before\n{START}\nan old table\n{END}\nafter"

    new = audits.with_table(page, committed)

    assert "an old table" not in new
    assert new.startswith(f"before\n{START}\n| attack |")
    assert new.endswith(f"|\n{END}\nafter")
    assert audits.with_table(new, committed) == new


# A part is measured again. "matching", the searches and the clumps take long, and are left out.
AGAIN = [
    "dense", "dense-8", "cosines", "cosines-label", "signs", "statistics", "norm", "norm-8",
    "values", "values-8", "pixel-counts", "loss", "angles", "angles-noise", "pairs-8",
    "known-labels", "linked", "words",
]  # fmt: skip


@pytest.mark.slow
def test_the_committed_conclusions_hold_on_other_digits_models_and_secrets(committed):
    sizes = audits.Sizes(victims=60, batches=30, crowd=200, writers=60)

    again = audits.audit(seed=11, sizes=sizes, only=AGAIN)

    for attack, by_view in again.rows:
        for view, measured in by_view.items():
            before = committed.measured[attack.key][view].word
            # What is a hint in one scene may be chance, or a leak, in another.
            if "hints" not in (before, measured.word):
                chances = [word == "chance" for word in (before, measured.word)]
                assert chances[0] == chances[1], (attack.key, view, before, measured)


# What people see


def test_the_markdown_table_has_a_row_for_each_attack(committed):
    lines = audits.markdown(committed).splitlines()

    assert len(lines) == 2 + len(audits.ATTACKS)
    assert {line.count("|") for line in lines} == {10}


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_shows_every_attack_and_no_cut_number(committed, width):
    console = Console(width=width, file=io.StringIO())

    audits.print_results(committed, console)

    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(attack.title.split(",")[0].split()[0] in text for attack in audits.ATTACKS)


def test_the_command_is_there_and_loads_the_audit_only_when_it_runs():
    result = subprocess.run(
        [sys.executable, "-m", "fedbranch", "audit", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert "--quick" in result.stdout
    assert "--out" in result.stdout


def test_digits_are_cut_like_arrays():
    digits = Digits(np.zeros((4, 64), np.float32), np.arange(4))

    assert list(digits[1:3].labels) == [1, 2]
    assert len(digits) == 4
