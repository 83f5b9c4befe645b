"""Clients that lie about the losses that the rule asks them for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import fedbranch as fb

__all__ = ["Deceived", "exchanged", "for_a_merge"]


@dataclass(frozen=True, kw_only=True)
class Deceived(fb.AutoRule):
    """The default rule, with clients that lie about their losses.

    Before a split, liars exchange the loss after a step together and the loss after a step of
    their group. After a split, they claim that the mean of all models is as good for them as
    the best model is, and each leaf as bad as the worst.

    Attributes
    ----------
    liars
        Their client ids.
    """

    liars: frozenset[str] = frozenset()

    def examine(self, evidence: fb.Evidence) -> fb.Decision:
        """Decide on the losses that the clients claim."""
        claimed = {
            client_id: exchanged(tuple(losses)) if client_id in self.liars else losses
            for client_id, losses in evidence.losses.items()
        }
        return super().examine(replace(evidence, losses=claimed))

    def review(self, review: fb.Review) -> fb.Decision:
        """Review a split on the losses that the clients claim."""
        claimed = {
            client_id: for_a_merge(tuple(losses)) if client_id in self.liars else losses
            for client_id, losses in review.losses.items()
        }
        return super().review(replace(review, losses=claimed))


def exchanged(losses: tuple[float, ...]) -> tuple[float, ...]:
    """Exchange the losses of each pair: after a step together, and of the own group."""
    return tuple(losses[place ^ 1] for place in range(len(losses)))


def for_a_merge(losses: tuple[float, ...]) -> tuple[float, ...]:
    """Claim the best loss for the mean of all models, which comes first, the worst for leaves."""
    return (min(losses), *[max(losses)] * (len(losses) - 1))
