"""What a server can be told, whichever driver runs it: options that travel whole.

The simulator, the Flower strategy, experiments and checkpoints take and pass on one
:class:`ServerOptions`. The keywords of :class:`fedbranch.Server`, :func:`fedbranch.simulate` and
the strategy are a convenience: :func:`options_from` makes options of them.
"""

from __future__ import annotations

import math
import operator
from dataclasses import asdict, dataclass, field, replace
from typing import TypedDict

from fedbranch.core.geometry import weighted_mean
from fedbranch.core.projection import SMALLEST_SIZE, Projection
from fedbranch.core.robust import aggregate_from_state, aggregate_to_state
from fedbranch.errors import DamagedFile
from fedbranch.rules import AutoRule, Rule, rule_from_state, rule_to_state
from fedbranch.server.guard import DEFAULT_GUARD, Guard
from fedbranch.tree import EdgeCache, InMemory, cache_to_state
from fedbranch.types import JSON, Aggregate, Weighting

__all__ = ["NOT_IN_OLDER_RUNS", "OptionKeywords", "ServerOptions", "options_from"]

# Older run folders do not have these names, and did what was the default then.
NOT_IN_OLDER_RUNS = frozenset({"weighting", "max_examples", "aggregate", "sketch", "keep_updates"})


class OptionKeywords(TypedDict, total=False):
    """The fields of :class:`ServerOptions` as keywords of a function."""

    rule: Rule | None
    weighting: Weighting
    aggregate: Aggregate
    max_examples: float
    guard: Guard | None
    cache: EdgeCache | None
    sketch: int | Projection | None
    keep_updates: bool


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server averages, compares, guards and keeps the updates of its clients.

    Parameters
    ----------
    rule
        Decides when clusters split; by default :class:`fedbranch.AutoRule`.
    weighting
        ``"examples"``: clients count by their number of examples. ``"equal"``: all alike.
    aggregate
        Maps updates (num_clients, dim) and weights (num_clients,) to one vector (dim,).
    max_examples
        A reply that claims more examples is refused.
    guard
        What is done against hostile clients; None: nothing.
    cache
        How the tree keeps the updates that newcomers are compared with: by default
        :class:`fedbranch.InMemory`; :class:`fedbranch.Sketched` or :class:`fedbranch.OnDisk` for
        large populations.
    sketch
        Find clusters and route newcomers by sketches of this size instead of by whole updates or
        signals; or a :class:`fedbranch.core.projection.Projection` that makes them, with a seed
        of your own. None: by whole ones.
    keep_updates
        False, with sketches: updates are added up as they come and not kept. Memory is then that
        of the models, of the sketches, and of the batches that come in. The aggregate is the
        weighted mean, and no client can be asked to measure how a split would pay. The guard
        limits lengths by the median of the round before, and finds strangers by their sketches,
        after their updates have been counted in that round's mean.

    Examples
    --------
    >>> ServerOptions(sketch=1024).keep_updates
    True
    >>> ServerOptions(keep_updates=False)
    Traceback (most recent call last):
        ...
    ValueError: keep_updates is False without sketches, so nothing is left to find clusters by; give the size of a sketch as well, such as sketch=1024
    """

    rule: Rule = field(default_factory=AutoRule)
    weighting: Weighting = "examples"
    aggregate: Aggregate = weighted_mean
    max_examples: float = 1e9
    guard: Guard | None = DEFAULT_GUARD
    cache: EdgeCache = field(default_factory=InMemory)
    sketch: int | Projection | None = None
    keep_updates: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.rule, type) or not callable(getattr(self.rule, "examine", None)):
            raise TypeError(
                f"rule is {self.rule!r}; pass an object that can examine a cluster, such as "
                "Thresholds(eps_mean=..., eps_max=..., gamma_max=...)"
            )
        if self.weighting not in ("examples", "equal"):
            raise ValueError(
                f"weighting is {self.weighting!r}; it must be one of ('examples', 'equal')"
            )
        if not callable(self.aggregate):
            raise TypeError(
                f"aggregate is {self.aggregate!r}; pass a function of updates and weights, such "
                "as fedbranch.core.median"
            )
        if not 0 < self.max_examples < math.inf:
            raise ValueError(
                f"max_examples is {self.max_examples!r}; it must be positive and finite"
            )
        object.__setattr__(self, "max_examples", float(self.max_examples))
        if self.guard is not None and not isinstance(self.guard, Guard):
            raise TypeError(f"guard is {self.guard!r}; pass a Guard, or None for none")
        self._check_keeping()

    def _check_keeping(self) -> None:
        """Check how updates, or sketches of them, are kept."""
        if self.sketch is not None and not isinstance(self.sketch, Projection):
            try:
                size = operator.index(self.sketch)
            except TypeError:
                raise TypeError(
                    f"sketch is {self.sketch!r}; give the size of sketches as a whole number, "
                    "such as 1024"
                ) from None
            if size < SMALLEST_SIZE:
                raise ValueError(
                    f"sketch is {self.sketch}; sketches have at least {SMALLEST_SIZE} numbers"
                )
        if not isinstance(self.keep_updates, bool):
            raise TypeError(f"keep_updates is {self.keep_updates!r}; it must be True or False")
        if not self.keep_updates and self.sketch is None:
            raise ValueError(
                "keep_updates is False without sketches, so nothing is left to find clusters by; "
                "give the size of a sketch as well, such as sketch=1024"
            )
        if not self.keep_updates and self.aggregate is not weighted_mean:
            raise ValueError(
                f"aggregate is {self.aggregate!r} and keep_updates False; updates that are added "
                "up as they come have no other aggregate than weighted_mean"
            )

    @property
    def most_clusters(self) -> float:
        """How many clusters there may be at most; infinite without a limit."""
        most = None if self.guard is None else self.guard.max_clusters
        return math.inf if most is None else most

    def projection_for(self, num_compared: int) -> Projection | None:
        """Return what makes sketches of vectors with ``num_compared`` numbers; None: nothing does.

        Raises
        ------
        ValueError
            If the options have a projection of vectors of another length.
        """
        if self.sketch is None:
            return None
        projection = self.sketch
        if not isinstance(projection, Projection):
            # More numbers than there are would make nothing more exact.
            size = max(SMALLEST_SIZE, min(projection, num_compared))
            projection = Projection(dim=num_compared, size=size)
        if projection.dim != num_compared:
            raise ValueError(
                f"sketch is for vectors of {projection.dim} numbers; what is compared has "
                f"{num_compared}"
            )
        return projection

    # Files

    def describe(self) -> JSON:
        """Return the options as JSON, for a run folder and for people."""
        sketch = self.sketch
        return {
            "rule": rule_to_state(self.rule),
            "weighting": self.weighting,
            "aggregate": aggregate_to_state(self.aggregate),
            "max_examples": self.max_examples,
            "guard": None if self.guard is None else asdict(self.guard),
            "cache": cache_to_state(self.cache),
            "sketch": asdict(sketch) if isinstance(sketch, Projection) else sketch,
            "keep_updates": self.keep_updates,
        }

    def to_state(self) -> JSON:
        """Return the options of a server as a part of its checkpoint; the tree keeps the cache."""
        state = self.describe()
        del state["cache"]
        state["projection"] = state.pop("sketch")
        return state

    @classmethod
    def from_state(
        cls,
        state: JSON,
        *,
        rule: Rule | None = None,
        aggregate: Aggregate | None = None,
        cache: EdgeCache,
    ) -> ServerOptions:
        """Rebuild options from what :meth:`to_state` returned, or an older version wrote.

        Parameters
        ----------
        state
            The checkpoint of a server.
        rule, aggregate
            Take the place of the saved ones; needed if those were not fedbranch's.
        cache
            How the tree keeps updates from now on.

        Raises
        ------
        DamagedFile
            If a rule or an aggregate is needed and not given.
        """
        saved = state.get("aggregate")
        if aggregate is None:
            try:
                aggregate = weighted_mean if saved is None else aggregate_from_state(saved)
            except ValueError as error:
                raise DamagedFile(str(error)) from error
        return cls(
            rule=rule_from_state(state["rule"]) if rule is None else rule,
            weighting=state["weighting"],
            aggregate=aggregate,
            max_examples=state["max_examples"],
            guard=None if state["guard"] is None else Guard(**state["guard"]),
            cache=cache,
            sketch=None if not state["projection"] else Projection(**state["projection"]),
            keep_updates=state["keep_updates"],
        )


def options_from(options: ServerOptions | None, keywords: OptionKeywords) -> ServerOptions:
    """Make options of an object, of keywords, or of an object that keywords change.

    Examples
    --------
    >>> options_from(ServerOptions(sketch=64), {"weighting": "equal"}).sketch
    64
    """
    if options is not None and not isinstance(options, ServerOptions):
        raise TypeError(f"options is {options!r}; pass ServerOptions(...), or leave it out")
    unknown = keywords.keys() - OptionKeywords.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"{sorted(unknown)} are no options of a server; these are "
            f"{sorted(OptionKeywords.__annotations__)}"
        )
    # None stands for the default of these two, as where a keyword is left out.
    given = {
        name: value
        for name, value in keywords.items()
        if not (value is None and name in ("rule", "cache"))
    }
    return replace(ServerOptions() if options is None else options, **given)  # type: ignore[arg-type]  # one TypedDict has the types
