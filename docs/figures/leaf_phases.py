"""Draw the phases of a leaf and what leads from one to the next: ``docs/figures/leaf-phases.svg``.

All of it is read from the table in ``fedbranch.server.leaf``, whenever the documentation is built.
"""

from __future__ import annotations

import inspect
import textwrap
from html import escape
from pathlib import Path

from fedbranch.server.leaf import TRANSITIONS, Event

PATH = Path(__file__).parent / "leaf-phases.svg"

WIDTH, MARGIN = 960, 20
PHASE_X, PHASE_WIDTH, PHASE_HEIGHT, PHASE_STEP = 540, 400, 68, 92
HUB_X, HUB_WIDTH, HUB_HEIGHT = MARGIN, 220, 84
BLUE, GREY, INK = "#2563a8", "#9aa3ad", "#1c2733"


def drawing() -> str:
    """Return the diagram as SVG."""
    phases = list(TRANSITIONS)
    top_of = {phase: MARGIN + row * PHASE_STEP for row, phase in enumerate(phases)}
    height = max(top_of.values()) + PHASE_HEIGHT + MARGIN
    parts = [_phase(phase, top) for phase, top in top_of.items()]
    num_arrows = dict.fromkeys(phases, 0)
    for sources, row in _rows():
        middle = sum(top_of[phase] + PHASE_HEIGHT / 2 for phase in sources) / len(sources)
        parts.append(_hub(sources, middle))
        parts += [_way_back(middle, top_of[phase]) for phase in sources]
        for phase in dict.fromkeys(row.values()):
            events = [event for event, target in row.items() if target is phase]
            parts.append(_way_out(middle, top_of[phase] + 26 * num_arrows[phase], events))
            num_arrows[phase] += 1
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="system-ui, sans-serif" font-size="13" role="img" '
            f'aria-label="{escape(_in_words())}">',
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
            f'<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" '
            f'orient="auto"><path d="M0,0 L9,4 L0,8 z" fill="{BLUE}"/></marker></defs>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _rows() -> list[tuple[list[type], dict[Event, type]]]:
    """Return the phases that have the same row of the table, with that row."""
    rows: list[tuple[list[type], dict[Event, type]]] = []
    for phase, row in TRANSITIONS.items():
        for sources, same in rows:
            if same == dict(row):
                sources.append(phase)
                break
        else:
            rows.append(([phase], dict(row)))
    return rows


def _phase(phase: type, top: float) -> str:
    first_line = (inspect.getdoc(phase) or "").split("\n\n")[0].replace("\n", " ")
    lines = textwrap.wrap(first_line, 58)
    text = "".join(
        f'<tspan x="{PHASE_X + 14}" dy="{16 if number else 18}">{escape(line)}</tspan>'
        for number, line in enumerate(lines)
    )
    return (
        f'<rect x="{PHASE_X}" y="{top}" width="{PHASE_WIDTH}" height="{PHASE_HEIGHT}" rx="8" '
        f'fill="#eef4fb" stroke="{BLUE}"/>'
        f'<text x="{PHASE_X + 14}" y="{top + 22}" fill="{INK}">'
        f'<tspan font-weight="bold">{phase.__name__}</tspan>{text}</text>'
    )


def _hub(sources: list[type], middle: float) -> str:
    what = "A rule examines the leaf" if len(sources) > 1 else "A rule reviews the split"
    names = textwrap.wrap(", ".join(phase.__name__ for phase in sources), 26)
    lines = (
        [f"when it is {names[0]}", *names[1:]] if len(sources) > 1 else ["or a user takes it back"]
    )
    text = "".join(f'<tspan x="{HUB_X + 20}" dy="16">{escape(line)}</tspan>' for line in lines)
    top = middle - HUB_HEIGHT / 2
    return (
        f'<rect x="{HUB_X}" y="{top}" width="{HUB_WIDTH}" height="{HUB_HEIGHT}" rx="40" '
        f'fill="#f6f6f4" stroke="{GREY}"/>'
        f'<text x="{HUB_X + 20}" y="{middle - 12}" fill="{INK}">'
        f'<tspan font-weight="bold">{what}</tspan>{text}</text>'
    )


def _way_out(middle: float, top: float, events: list[Event]) -> str:
    """Draw the arrow of some events to a phase."""
    start, end = HUB_X + HUB_WIDTH, top + 24
    label = " / ".join(event.value for event in events)
    return (
        f'<path d="M{start},{middle} C{start + 90},{middle} {PHASE_X - 130},{end} '
        f'{PHASE_X - 2},{end}" fill="none" stroke="{BLUE}" marker-end="url(#tip)"/>'
        f'<text x="{PHASE_X - 14}" y="{end - 6}" text-anchor="end" fill="{BLUE}" '
        'stroke="#ffffff" stroke-width="4" paint-order="stroke">'
        f"{escape(label)}</text>"
    )


def _way_back(middle: float, top: float) -> str:
    """Draw the way from a phase to its next examination."""
    start, end = PHASE_X, top + PHASE_HEIGHT - 8
    return (
        f'<path d="M{start},{end} C{start - 120},{end} {HUB_X + HUB_WIDTH + 60},{middle + 14} '
        f'{HUB_X + HUB_WIDTH},{middle + 14}" fill="none" stroke="{GREY}" stroke-dasharray="3 3"/>'
    )


def _in_words() -> str:
    return "; ".join(
        f"from {phase.__name__}: "
        + ", ".join(f"{event.value} leads to {target.__name__}" for event, target in row.items())
        for phase, row in TRANSITIONS.items()
    )


if __name__ == "__main__":
    PATH.write_text(drawing(), encoding="utf-8")
