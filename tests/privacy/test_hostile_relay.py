"""The key agreement through a server that does what it likes with the messages."""

import itertools
import random

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from fedbranch.errors import (
    AgreementFailed,
    DamagedMessage,
    NotConfirmed,
    NotInRoster,
    ReplayedEnvelope,
    SplitView,
    SwappedCard,
    WrongRecipient,
    WrongRoster,
    WrongRun,
)
from fedbranch.privacy import Identity, Member, Secret
from fedbranch.privacy.statements import Card, Envelope
from fedbranch.privacy.wire import pack
from privacy.members import (
    agree,
    cards_of,
    confirm,
    federation,
    founded,
    has_no_secret,
    identities,
    roster_of,
)

# A hostile server


def test_a_card_with_the_servers_key_is_refused():
    leader, other = federation(2)
    servers_key = X25519PrivateKey.generate().public_key().public_bytes_raw()
    card = other.card().replace(other._card_key.public_key().public_bytes_raw(), servers_key)

    with pytest.raises(DamagedMessage, match="not what that member signed"):
        leader.seal([card])


def test_a_card_under_another_name_is_refused():
    leader, second, third = federation(3)

    with pytest.raises(SwappedCard, match="under the name of"):
        leader.seal({second.fingerprint: third.card(), third.fingerprint: second.card()})
    assert not leader.has_taken_a_secret


def test_two_cards_of_one_member_are_refused():
    leader, other = federation(2)
    earlier = Member(other.identity, other.roster)

    with pytest.raises(SwappedCard, match="two different cards"):
        leader.seal([other.card(), earlier.card()])


def test_an_invented_member_is_refused():
    leader, other = federation(2)
    invented = Card.write(Identity.new(), leader.roster, X25519PrivateKey.generate().public_key())

    with pytest.raises(NotInRoster, match="it never was"):
        leader.seal([other.card(), invented])
    assert not leader.has_taken_a_secret


def test_an_invented_leader_is_refused():
    _, other = federation(2)
    server = Identity.new()
    card = Card.read(other.card(), other.roster)
    secret = Secret.new("test")
    envelope = Envelope.write(server, other.roster, card, secret, says_agreed=True)

    with pytest.raises(NotInRoster):
        other.open(envelope)


def test_a_replayed_card_leads_to_an_envelope_that_no_member_opens():
    leader, other = federation(2)
    replayed = other.card()
    restarted = Member(other.identity, other.roster)

    envelope = leader.seal([replayed])[other.fingerprint]

    with pytest.raises(ReplayedEnvelope, match="another card of"):
        restarted.open(envelope)
    assert has_no_secret(restarted)
    assert has_no_secret(leader)


def test_a_replayed_envelope_is_refused():
    people = identities(2)
    earlier = [Member(identity, roster_of(people)) for identity in people]
    envelope = earlier[0].seal([earlier[1].card()])[earlier[1].fingerprint]
    later = Member(people[1], roster_of(people))

    with pytest.raises(ReplayedEnvelope):
        later.open(envelope)


def test_an_envelope_for_another_member_is_refused():
    leader, second, third = federation(3)
    envelopes = leader.seal(cards_of([second, third]))

    with pytest.raises(WrongRecipient, match=f"is for {third.fingerprint[:16]}"):
        second.open(envelopes[third.fingerprint])


def test_an_envelope_that_is_sealed_to_another_key_is_refused():
    leader, other = federation(2)
    card = Card.read(other.card(), other.roster)
    wrong = Card(card.owner, X25519PrivateKey.generate().public_key(), card.digest)
    secret = Secret.new("test")
    envelope = Envelope.write(leader.identity, leader.roster, wrong, secret, says_agreed=False)

    with pytest.raises(WrongRecipient, match="sealed to another key"):
        other.open(envelope)


def test_a_members_envelope_is_worth_nothing_under_another_members_signature():
    # The third member, or a thief of its key, signs what the leader sealed.
    leader, second, third = federation(3)
    envelope = leader.seal([second.card()])[second.fingerprint]
    body = envelope[: -len(pack(bytes(64)))]
    body = body.replace(leader.identity.public_bytes, third.identity.public_bytes)
    signed_again = body + pack(third.identity.sign(body))

    with pytest.raises(WrongRecipient, match="sealed to another key"):
        second.open(signed_again)


def test_only_the_sender_can_say_that_most_have_agreed():
    leader, second, *_ = federation(3)
    envelope = leader.seal([second.card()])[second.fingerprint]
    digest = Card.read(second.card(), second.roster).digest
    says_nothing, says_agreed = (digest + pack(said) for said in (b"\0", b"\1"))
    assert says_nothing in envelope

    with pytest.raises(DamagedMessage, match="not what that member signed"):
        second.open(envelope.replace(says_nothing, says_agreed))


def test_the_field_for_having_agreed_is_0_or_1():
    leader, other = federation(2)
    envelope = leader.seal([other.card()])[other.fingerprint]
    digest = Card.read(other.card(), other.roster).digest
    body = envelope[: -len(pack(bytes(64)))].replace(digest + pack(b"\0"), digest + pack(b"\2"))

    with pytest.raises(DamagedMessage, match="where 0 or 1 belongs"):
        other.open(body + pack(leader.identity.sign(body)))


@pytest.mark.parametrize("num_members", [2, 3])
def test_messages_of_another_run_are_refused(num_members):
    people = identities(num_members)
    here = [Member(identity, roster_of(people)) for identity in people]
    there = [Member(identity, roster_of(people, run="other")) for identity in people]
    founded(there[0], there[1:])

    with pytest.raises(WrongRun, match=r"for run b'other'; this is run 'test'"):
        here[0].seal([there[1].card()])
    with pytest.raises(WrongRun):
        here[1].open(there[0].seal([there[1].card()])[there[1].fingerprint])
    founded(here[0], here[1:])
    with pytest.raises(WrongRun):
        here[0].check([there[1].confirmation()])


def test_members_with_different_rosters_do_not_agree():
    people = identities(3)
    leader = Member(people[0], roster_of(people))
    other = Member(people[1], roster_of(people[:2]))

    with pytest.raises(WrongRoster, match="compare the two lists"):
        leader.seal([other.card()])


@pytest.mark.parametrize("num_members", [2, 3, 4, 5, 6])
def test_a_split_view_never_has_two_secrets_in_use(num_members):
    # All divisions of the members in two; each side is shown itself alone.
    for side in itertools.product([0, 1], repeat=num_members):
        members = federation(num_members)
        sides = [[m for m, s in zip(members, side, strict=True) if s == which] for which in (0, 1)]
        for group in filter(None, sides):
            founded(group[0], group[1:])
            for member in group:
                try:
                    member.check(one.confirmation() for one in group)
                except NotConfirmed:
                    assert len(group) <= num_members / 2
        in_use = {member.secret.key for member in members if member.has_agreed}
        assert len(in_use) <= 1


def test_members_that_hear_of_each_other_notice_a_split_view():
    members = federation(5)
    founded(members[0], members[1:3])
    founded(members[3], members[4:])

    for member in members:
        with pytest.raises(SplitView, match="different secrets"):
            member.check(one.confirmation() for one in members)
        assert has_no_secret(member)


def test_a_second_secret_is_refused_before_and_after_the_agreement():
    first, second, third = federation(3)
    founded(first, [third])
    second.seal([])
    envelope = second.seal([third.card()])[third.fingerprint]

    with pytest.raises(SplitView, match="stays with the first"):
        third.open(envelope)
    confirm([first, third])
    with pytest.raises(SplitView):
        third.open(envelope)
    assert third.secret == first.secret


def test_a_member_that_has_agreed_does_not_change_its_secret():
    people = identities(3)
    ours, theirs = ([Member(one, roster_of(people)) for one in people] for _ in range(2))
    agree(ours)
    theirs[2] = ours[2]  # the others lost their state and agreed on another secret
    agree(theirs[:2])
    envelope = theirs[0].seal([ours[2].card()])[ours[2].fingerprint]
    secret = ours[2].secret

    with pytest.raises(SplitView):
        ours[2].open(envelope)
    assert ours[2].secret == secret


def test_an_envelope_may_be_opened_twice():
    leader, other = federation(2)
    envelope = leader.seal([other.card()])[other.fingerprint]
    other.open(envelope)
    other.open(envelope)
    confirm([leader, other])

    assert other.secret == leader.secret


def test_the_own_confirmation_counts_once_however_often_it_comes_back():
    members = federation(3)
    founded(members[0], members[1:])

    with pytest.raises(NotConfirmed):
        members[0].check([members[0].confirmation()] * 5)


def test_another_members_confirmation_counts_once():
    members = federation(5)
    founded(members[0], members[1:])

    with pytest.raises(NotConfirmed):
        members[0].check([members[1].confirmation()] * 5)


def test_the_own_confirmation_under_another_name_is_refused():
    leader, other = federation(2)
    founded(leader, [other])
    names = [bytes.fromhex(member.fingerprint) for member in (leader, other)]

    with pytest.raises(SplitView):
        leader.check([leader.confirmation().replace(*names)])


def test_a_confirmation_of_an_earlier_agreement_is_refused():
    people = identities(2)
    earlier, later = ([Member(one, roster_of(people)) for one in people] for _ in range(2))
    agree(earlier)
    founded(later[0], later[1:])

    with pytest.raises(SplitView):
        later[0].check([earlier[1].confirmation()])


def test_one_message_is_not_taken_for_another():
    members = federation(2)
    leader, other = members
    envelope = leader.seal([other.card()])[other.fingerprint]
    other.open(envelope)

    for wrong in (other.card(), other.confirmation(), other.to_bytes()):
        with pytest.raises(DamagedMessage):
            other.open(wrong)
    for wrong in (envelope, other.confirmation()):
        with pytest.raises(DamagedMessage):
            leader.seal([wrong])
    for wrong in (envelope, other.card()):
        with pytest.raises(DamagedMessage):
            leader.check([wrong])


def test_a_signed_card_is_not_taken_for_a_signed_card_of_another_protocol():
    leader, other = federation(2)
    body = other.card()[: -len(pack(bytes(64)))].replace(b"agreement 1", b"agreement 2")

    with pytest.raises(DamagedMessage, match="key agreement 2"):
        leader.seal([body + pack(other.identity.sign(body))])


def test_a_key_that_cannot_be_sealed_to_is_refused():
    leader, other = federation(2)
    low_order = X25519PublicKey.from_public_bytes(bytes(32))

    with pytest.raises(DamagedMessage, match="cannot be sealed to"):
        leader.seal([Card.write(other.identity, other.roster, low_order)])
    assert not leader.has_taken_a_secret


# Damage


class Mail:
    """One of each message, and how it is received."""

    def __init__(self):
        self.leader, self.other = leader, other = federation(2)
        self.roster = leader.roster
        self.card = other.card()
        self.envelope = leader.seal([self.card])[other.fingerprint]
        self.unopened = other.to_bytes()
        other.open(self.envelope)
        self.confirmation = other.confirmation()
        self.memory = other.to_bytes()

    def receive(self, kind, blob):
        if kind == "card":
            Member(self.leader.identity, self.roster).seal([blob])
        elif kind == "envelope":
            Member.from_bytes(self.other.identity, self.roster, self.unopened).open(blob)
        elif kind == "confirmation":
            Member.from_bytes(self.leader.identity, self.roster, self.leader.to_bytes()).check(
                [blob]
            )
        else:
            Member.from_bytes(self.other.identity, self.roster, blob)


MAIL = Mail()
KINDS = ["card", "envelope", "confirmation", "memory"]


@pytest.mark.parametrize("kind", KINDS)
def test_undamaged_mail_is_received(kind):
    MAIL.receive(kind, getattr(MAIL, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_is_noticed(kind):
    blob = getattr(MAIL, kind)
    for bit in range(8 * len(blob)):
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AgreementFailed):
            MAIL.receive(kind, bytes(flipped))


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_noticed(kind):
    blob = getattr(MAIL, kind)
    for length in range(len(blob)):
        with pytest.raises(DamagedMessage):
            MAIL.receive(kind, blob[:length])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_other_damage_is_noticed(kind, data):
    blob = getattr(MAIL, kind)
    start = data.draw(st.integers(0, len(blob)))
    stop = data.draw(st.integers(start, len(blob)))
    damaged = blob[:start] + data.draw(st.binary(max_size=100)) + blob[stop:]

    if damaged != blob:
        with pytest.raises(AgreementFailed):
            MAIL.receive(kind, damaged)


@pytest.mark.parametrize("kind", KINDS)
@given(blob=st.binary(max_size=2000))
def test_anything_else_is_refused(kind, blob):
    with pytest.raises(AgreementFailed):
        MAIL.receive(kind, blob)


def test_long_messages_are_refused_unread():
    leader, _ = federation(2)

    with pytest.raises(DamagedMessage, match="a message of 5000 bytes"):
        leader.seal([bytes(5000)])


def test_messages_of_the_longest_run_name_are_not_too_long():
    members = federation(2, run="ü" * 100)

    agree(members)

    assert members[0].secret == members[1].secret


# A random server


def deliver_at_random(seed):
    """Ask random members to seal for others; pass on, mix up, repeat and drop their messages."""
    rng = random.Random(seed)
    members = federation(rng.choice([3, 4, 5, 6]))
    by_name = {member.fingerprint: member for member in members}
    envelopes, confirmations, refused = [], [], set()
    for _ in range(80):
        member = rng.choice(members)
        try:
            match rng.choice(["seal", "open", "open", "open", "confirm", "check"]):
                case "seal":
                    shown = rng.sample(members, rng.randint(0, len(members)))
                    envelopes += member.seal(cards_of(shown)).items()
                case "open" if envelopes:
                    name, envelope = rng.choice(envelopes)
                    rng.choice([by_name[name], by_name[name], member]).open(envelope)
                case "confirm":
                    confirmations.append(member.confirmation())
                case "check":
                    member.check(rng.sample(confirmations, min(len(confirmations), 2)))
        except AgreementFailed as error:
            refused.add(type(error))
        if rng.random() < 0.2:  # a process ends, and another one goes on
            again = Member.from_bytes(member.identity, member.roster, member.to_bytes())
            members[members.index(member)] = by_name[member.fingerprint] = again
        assert len({one.secret.key for one in members if one.has_agreed}) <= 1
    return members, refused


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_server_delivers_at_most_one_secret_is_in_use(seed):
    deliver_at_random(seed)


def test_what_is_delivered_at_random_reaches_agreements_and_split_views():
    # Otherwise the test above would show nothing.
    outcomes = [deliver_at_random(seed) for seed in range(40)]

    assert any(all(one.has_agreed for one in members) for members, _ in outcomes)
    assert any(not any(one.has_agreed for one in members) for members, _ in outcomes)
    assert sum(SplitView in refused for _, refused in outcomes) > 10
