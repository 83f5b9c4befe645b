"""The key agreement: honest members, late and removed ones, and what they keep."""

import pickle
import time

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedbranch.errors import (
    DamagedMessage,
    NotConfirmed,
    NotInRoster,
    NotLeader,
    SplitView,
    StaleEpoch,
)
from fedbranch.privacy import Member, Secret
from fedbranch.privacy.statements import SUITE, Card, Envelope
from privacy.members import (
    agree,
    cards_of,
    confirm,
    federation,
    founded,
    has_no_secret,
    identities,
    next_epoch,
    roster_of,
)

# The honest case


@pytest.mark.parametrize("num_members", [1, 2, 3, 5, 100])
def test_honest_members_agree(num_members):
    members = federation(num_members)

    agree(members)

    assert len({member.secret.key for member in members}) == 1
    assert members[0].secret.run == "test"
    assert members[0].secret.epoch == 1
    assert all(member.has_agreed for member in members)


def test_a_card_and_an_envelope_are_the_only_round_trip():
    leader, other = federation(2)
    envelope = leader.seal([other.card()])[other.fingerprint]  # card there, envelope back
    other.open(envelope)

    # Only confirmations are left, which can go with any other message.
    leader.check([other.confirmation()])
    other.check([leader.confirmation()])

    assert leader.secret == other.secret


def test_every_agreement_has_another_secret():
    people = identities(2)
    pairs = [[Member(identity, roster_of(people)) for identity in people] for _ in range(2)]
    for pair in pairs:
        agree(pair)

    assert pairs[0][0].secret != pairs[1][0].secret


def test_the_work_of_a_member_grows_no_faster_than_the_members():
    def seconds_of_the_leader(num_members):
        leader, *others = federation(num_members)
        cards = cards_of(others)
        start = time.perf_counter()
        leader.seal(cards)
        return time.perf_counter() - start

    small = min(seconds_of_the_leader(10) for _ in range(3))
    large = min(seconds_of_the_leader(100) for _ in range(3))

    assert large < 60 * small  # eleven times the cards


def test_cards_may_come_by_name_and_the_leaders_own_may_be_among_them():
    leader, *others = federation(3)

    envelopes = leader.seal({member.fingerprint: member.card() for member in [leader, *others]})

    assert set(envelopes) == {other.fingerprint for other in others}


def test_a_card_that_comes_twice_counts_once():
    leader, other = federation(2)

    assert len(leader.seal([other.card(), other.card()])) == 1


def test_a_member_has_no_secret_before_it_is_confirmed():
    members = federation(3)
    assert all(map(has_no_secret, members))

    founded(members[0], members[1:])
    assert all(map(has_no_secret, members))

    confirm(members)
    assert members[0].secret == members[1].secret == members[2].secret


@pytest.mark.parametrize(("num_members", "needed"), [(2, 2), (3, 2), (4, 3), (5, 3), (6, 4)])
def test_more_than_half_of_the_roster_must_confirm(num_members, needed):
    members = federation(num_members)
    founded(members[0], members[1:])
    *too_few, last = [member.confirmation() for member in members[1:needed]]

    with pytest.raises(NotConfirmed, match=f"and needs {needed};"):
        members[0].check(too_few)
    members[0].check([last])  # the earlier ones count

    assert members[0].has_agreed


def test_nothing_can_be_confirmed_without_a_secret():
    member, other = federation(2)

    with pytest.raises(NotConfirmed, match="needs an envelope"):
        member.confirmation()
    with pytest.raises(NotConfirmed, match="needs an envelope"):
        member.check([other.card()])


def test_a_given_secret_is_passed_on():
    _, second, third = federation(3)
    secret = Secret.new("test")
    third.open(second.seal([third.card()], secret)[third.fingerprint])
    confirm([second, third])

    assert third.secret == secret


@pytest.mark.parametrize("secret", [Secret.new("other"), Secret.new("test", epoch=2)])
def test_a_secret_of_another_run_or_epoch_is_not_passed_on(secret):
    leader, other = federation(2)

    with pytest.raises(ValueError, match="leave it out to draw one"):
        leader.seal([other.card()], secret)


def test_a_member_passes_on_no_other_secret_than_its_own():
    leader, other = federation(2)
    leader.seal([other.card()])

    with pytest.raises(ValueError, match="not the one that was taken"):
        leader.seal([other.card()], Secret.new("test"))


# The leader


def test_only_the_lowest_fingerprint_draws_a_secret():
    first, second, _ = members = federation(3)

    with pytest.raises(NotLeader, match=first.fingerprint[:16]):
        second.seal(cards_of(members))
    assert not second.has_taken_a_secret


def test_a_leader_that_is_asked_again_passes_on_the_same_secret():
    # The server shows it some cards first, others later.
    members = federation(5)
    founded(members[0], members[1:3])
    founded(members[0], members[3:])
    confirm(members)

    assert len({member.secret.key for member in members}) == 1


def test_when_the_leader_vanishes_before_it_sends_another_member_leads():
    _, *rest = federation(5)

    agree(rest)

    assert len({member.secret.key for member in rest}) == 1


def test_when_the_leader_vanishes_half_way_its_secret_is_passed_on():
    leader, second, third, *rest = federation(5)
    second.open(leader.seal(cards_of([second, third, *rest]))[second.fingerprint])
    # Nothing else of what the leader sent arrives, and it never confirms.

    present = [second, third, *rest]
    founded(second, present[1:])
    confirm(present)

    assert len({member.secret.key for member in present}) == 1
    leader.check([third.confirmation(), rest[0].confirmation()])  # it comes back
    assert leader.secret == second.secret


def test_when_two_members_led_only_one_secret_comes_into_use():
    first, second, *rest = federation(5)
    founded(first, rest[:1])  # and vanishes
    founded(second, rest[1:])  # was not told of the first

    with pytest.raises(SplitView):
        rest[0].open(second.seal([rest[0].card()])[rest[0].fingerprint])
    confirm([second, *rest[1:]])

    assert second.secret == rest[1].secret == rest[2].secret
    assert has_no_secret(first)
    assert has_no_secret(rest[0])


def test_a_member_with_a_secret_that_never_comes_into_use_gets_the_other_one():
    first, second, *rest = members = federation(5)
    founded(first, rest[:1])
    founded(second, rest[1:])
    confirm([second, *rest[1:]])

    founded(rest[2], [first, rest[0]])  # knows that more than half have its secret

    assert len({member.secret.key for member in members}) == 1


# Late members, and removed ones


@pytest.mark.parametrize("host", range(3))
def test_a_late_member_gets_the_secret_from_any_member_in_one_round_trip(host):
    *early, late = federation(4)
    agree(early)

    late.open(early[host].seal([late.card()])[late.fingerprint])

    assert late.secret == early[0].secret


def test_a_late_member_must_see_confirmations_if_its_host_has_not():
    *early, late = federation(4)
    founded(early[0], early[1:])
    late.open(early[1].seal([late.card()])[late.fingerprint])

    assert has_no_secret(late)
    late.check(member.confirmation() for member in early)
    assert late.secret == early[0]._taken


def test_a_member_that_lost_everything_is_a_late_member():
    members = federation(3)
    agree(members)
    again = Member(members[1].identity, members[1].roster)

    again.open(members[2].seal([again.card()])[again.fingerprint])

    assert again.secret == members[0].secret


def test_removal_starts_an_epoch_with_a_fresh_secret():
    members = federation(4)
    agree(members)
    remaining = next_epoch(members, members[1])

    agree(remaining)

    assert remaining[0].secret.epoch == 2
    assert remaining[0].secret.key != members[0].secret.key


def test_a_removed_member_cannot_open_what_it_sees():
    members = federation(3)
    agree(members)
    removed = members[1]
    first, last = next_epoch(members, removed)
    envelope = first.seal([last.card()])[last.fingerprint]

    with pytest.raises(StaleEpoch, match="epoch 2, this member is in epoch 1"):
        removed.open(envelope)
    with pytest.raises(NotInRoster, match="was removed"):
        Member(removed.identity, first.roster)
    read = Envelope.read(envelope, first.roster)  # with all its keys, past all checks
    with pytest.raises(InvalidTag):
        SUITE.decrypt(read.sealed, removed._card_key, read.info)


def test_a_removed_member_that_answers_is_refused():
    members = federation(3)
    agree(members)
    removed = members[1]
    first, last = next_epoch(members, removed)
    # Its card is for the new roster, which it was shown by the server.
    card = Card.write(removed.identity, first.roster, X25519PrivateKey.generate().public_key())

    for answer in (card, removed.card()):
        with pytest.raises(NotInRoster, match="was removed"):
            first.seal([last.card(), answer])
    assert not first.has_taken_a_secret
    founded(first, [last])
    with pytest.raises(NotInRoster, match="was removed"):
        first.check([removed.confirmation()])


def test_messages_of_an_earlier_epoch_are_refused():
    members = federation(3)
    founded(members[0], members[1:])
    envelope = members[0].seal([members[2].card()])[members[2].fingerprint]
    confirmation = members[2].confirmation()
    first, last = next_epoch(members, members[1])

    with pytest.raises(StaleEpoch, match="epoch 1, this member is in epoch 2"):
        first.seal([members[2].card()])
    with pytest.raises(StaleEpoch):
        last.open(envelope)
    founded(first, [last])
    with pytest.raises(StaleEpoch):
        first.check([confirmation])


def test_messages_of_a_later_epoch_tell_a_member_that_it_is_behind():
    members = federation(3)
    first, _ = next_epoch(members, members[1])

    with pytest.raises(
        StaleEpoch, match="the member in the earlier epoch needs the present roster"
    ):
        members[2].seal([first.card()])


# What a member keeps


def test_a_member_goes_on_where_it_was():
    members = federation(3)

    def restarted(member):
        return Member.from_bytes(member.identity, member.roster, member.to_bytes())

    cards = [member.card() for member in members]
    members = [restarted(member) for member in members]
    assert [member.card() for member in members] == cards
    envelopes = members[0].seal(cards)
    for member in members[1:]:
        member.open(envelopes[member.fingerprint])
    members = [restarted(member) for member in members]
    assert all(map(has_no_secret, members))
    confirm(members)
    members = [restarted(member) for member in members]

    assert len({member.secret.key for member in members}) == 1


def test_a_late_member_still_has_the_secret_after_a_restart():
    *early, late = federation(3)
    agree(early)
    late.open(early[0].seal([late.card()])[late.fingerprint])

    again = Member.from_bytes(late.identity, late.roster, late.to_bytes())

    assert again.secret == early[0].secret


def test_a_restarted_member_still_refuses_a_second_secret():
    first, second, third = federation(3)
    founded(first, [third])
    third = Member.from_bytes(third.identity, third.roster, third.to_bytes())
    envelope = second.seal([third.card()])[third.fingerprint]

    with pytest.raises(SplitView):
        third.open(envelope)


def test_a_memory_is_of_one_member_and_epoch():
    members = federation(3)
    first, _ = next_epoch(members, members[1])

    with pytest.raises(DamagedMessage, match="another member's"):
        Member.from_bytes(members[2].identity, members[2].roster, members[0].to_bytes())
    with pytest.raises(StaleEpoch):
        Member.from_bytes(first.identity, first.roster, members[0].to_bytes())


def test_nothing_of_the_secret_is_in_any_message_or_shown():
    members = federation(3)
    cards = cards_of(members)
    envelopes = members[0].seal(cards)
    for member in members[1:]:
        member.open(envelopes[member.fingerprint])
    confirm(members)
    secret = members[0].secret
    keys = [
        secret.key,
        *(member._card_key.private_bytes_raw() for member in members),
        *(member.identity._key.private_bytes_raw() for member in members),
        secret.derived("key agreement: confirmation"),
    ]
    seen = [*cards, *envelopes.values(), *(m.confirmation() for m in members)]
    seen += [member.to_bytes() for member in members]
    shown = "".join(f"{m!r} {m!s} {m.identity!r} {m.roster!r}" for m in members)

    for key in keys:
        for part in (key[:8], key[-8:]):
            assert not any(part in blob for blob in seen)
            assert part.hex() not in shown
            assert repr(part)[2:-1] not in shown


def test_members_and_identities_are_not_pickled():
    member, _ = federation(2)

    with pytest.raises(TypeError, match="keep it with to_bytes"):
        pickle.dumps(member)
    with pytest.raises(TypeError, match="keep it with to_pem"):
        pickle.dumps(member.identity)
