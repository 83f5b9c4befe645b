"""A decision in the making: what was measured so far, and the ways in which it can end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from fedbranch.rules.evidence import Asks, Decision, Evidence, Groups, Verdict, norm_measurements

__all__ = ["Draft"]


@dataclass
class Draft:
    """A decision about a leaf that is being made.

    Attributes
    ----------
    evidence
        What the decision is about.
    measured
        Everything that was measured so far, by name; the two norms are there from the start.
    """

    evidence: Evidence
    measured: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.measured |= norm_measurements(self.evidence)

    def wait(self, reason: str, asks: Asks = "nothing") -> Decision:
        """Train, because it is not time for an examination."""
        return replace(self._decision("train", reason, (), asks), is_examination=False)

    def train(self, reason: str) -> Decision:
        """Train after an examination."""
        return self._decision("train", reason, (), "nothing")

    def hold(self, reason: str) -> Decision:
        """Keep the parameters still, and go on asking for what is missing."""
        asks: Asks = "losses" if self.evidence.proposal else "nothing"
        return self._decision("hold", reason, self.evidence.proposal, asks)

    def propose(self, reason: str, groups: Groups) -> Decision:
        """Keep the parameters still while clients measure what these groups gain."""
        return self._decision("hold", reason, groups, "losses")

    def split(self, reason: str, groups: Groups) -> Decision:
        """Split into groups."""
        return self._decision("split", reason, groups, "nothing")

    def _decision(self, verdict: Verdict, reason: str, groups: Groups, asks: Asks) -> Decision:
        return Decision(
            node_id=self.evidence.node_id,
            round=self.evidence.round,
            verdict=verdict,
            reason=reason,
            measurements={n: v for n, v in self.measured.items() if math.isfinite(v)},
            groups=groups,
            asks=asks,
        )
