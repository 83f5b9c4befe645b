"""Members of small federations, and what they do when the server interferes with nothing."""

import pytest

from fedbranch.errors import NotConfirmed
from fedbranch.privacy import Identity, Member, Roster


def identities(num_members):
    """Make identities; the one that leads comes first."""
    return sorted((Identity.new() for _ in range(num_members)), key=lambda one: one.fingerprint)


def roster_of(members, run="test", epoch=1):
    return Roster(run, {member.fingerprint for member in members}, epoch)


def federation(num_members, run="test", epoch=1):
    """Make members that have the same roster and no secret; the leader comes first."""
    people = identities(num_members)
    roster = roster_of(people, run, epoch)
    return [Member(identity, roster) for identity in people]


def cards_of(members):
    return [member.card() for member in members]


def founded(leader, others):
    """Let a leader draw a secret and seal it to some members, which open it."""
    envelopes = leader.seal(cards_of(others))
    for other in others:
        other.open(envelopes[other.fingerprint])


def confirm(members):
    confirmations = [member.confirmation() for member in members]
    for member in members:
        member.check(confirmations)


def agree(members):
    founded(members[0], members[1:])
    confirm(members)


def has_no_secret(member):
    with pytest.raises(NotConfirmed):
        _ = member.secret
    return True


def next_epoch(members, removed):
    roster = members[0].roster.without(removed.fingerprint)
    return [Member(m.identity, roster) for m in members if m is not removed]
