"""Panels of points as SVG text: what matplotlib draws differs from version to version."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Curve", "Panel", "Point", "svg"]

_COLUMNS = 3
_WIDTH = 310
"""Width of a panel, in pixels, as all sizes here."""
_HEIGHT = 250
"""Height of a panel."""
_LEFT = 52
_RIGHT = 18
_TOP = 30
_BOTTOM = 42
"""Margins between the edges of a panel and its axes, of which this is the lower one."""
_LEGEND = 30
"""Height of the legend."""
_NOTE = 18
"""Height of a line of notes."""
_LETTER = 6
"""Width of a letter, nearly."""
_TICKS = 5
_COLOURS = ("#1764ab", "#c85200")
_DASHES = ("none", "5 3")
_STYLE = "text{font-family:sans-serif;font-size:11px;fill:#222}.t{font-weight:bold;font-size:12px}"


@dataclass(frozen=True)
class Point:
    """A run: its label, tokens/s per user, and output tokens/s per GPU."""

    label: str
    interactivity: float
    throughput: float


@dataclass(frozen=True)
class Curve:
    """The runs of one engine."""

    engine: str
    points: list[Point]


@dataclass(frozen=True)
class Panel:
    """Curves on common axes, which start at 0."""

    title: str
    curves: list[Curve]


def svg(panels: Sequence[Panel], notes: Sequence[str]) -> str:
    """The whole picture; the first panel's engines are the legend."""
    columns = min(_COLUMNS, len(panels))
    width = _WIDTH * columns
    rows = math.ceil(len(panels) / columns)
    wrapped = [line for note in notes for line in textwrap.wrap(note, width // _LETTER)]
    height = _LEGEND + rows * _HEIGHT + len(wrapped) * _NOTE + 6
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        "<title>Throughput against interactivity</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_legend([curve.engine for curve in panels[0].curves]),
    ]
    for i, panel in enumerate(panels):
        x = i % columns * _WIDTH
        y = _LEGEND + i // columns * _HEIGHT
        lines += [f'<g transform="translate({x},{y})">', *_panel(panel), "</g>"]
    for i, note in enumerate(wrapped):
        lines.append(_text(8, _LEGEND + rows * _HEIGHT + (i + 1) * _NOTE - 4, note, "start"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend(engines: Iterable[str]) -> list[str]:
    lines = []
    for i, engine in enumerate(engines):
        x = _LEFT + 90 * i
        lines.append(
            f'<line x1="{x}" y1="18" x2="{x + 26}" y2="18" stroke="{_COLOURS[i]}" stroke-width="2" '
            f'stroke-dasharray="{_DASHES[i]}"/>'
        )
        lines.append(_text(x + 32, 22, engine, "start"))
    return lines


def _panel(panel: Panel) -> list[str]:
    points = [point for curve in panel.curves for point in curve.points]
    xs = _ticks(max(point.interactivity for point in points))
    ys = _ticks(max(point.throughput for point in points))
    right = _WIDTH - _RIGHT
    bottom = _HEIGHT - _BOTTOM

    def place(point: Point) -> tuple[float, float]:
        x = _LEFT + (right - _LEFT) * point.interactivity / xs[-1]
        return x, bottom - (bottom - _TOP) * point.throughput / ys[-1]

    lines = [_text(_LEFT, _TOP - 12, panel.title, "start", "t")]
    for tick in xs:
        x = _LEFT + (right - _LEFT) * tick / xs[-1]
        lines.append(_grid(x, _TOP, x, bottom))
        lines.append(_text(x, bottom + 14, f"{tick:,.0f}", "middle"))
    for tick in ys:
        y = bottom - (bottom - _TOP) * tick / ys[-1]
        lines.append(_grid(_LEFT, y, right, y))
        lines.append(_text(_LEFT - 5, y + 4, _thousands(tick), "end"))
    lines.append(_text((_LEFT + right) / 2, bottom + 31, "interactivity: tokens/s per user", "middle"))
    lines.append(
        f'<text x="12" y="{(_TOP + bottom) / 2:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {(_TOP + bottom) / 2:.1f})">output tokens/s per GPU</text>'
    )
    for i, curve in enumerate(panel.curves):
        lines += _curve(i, curve, [place(point) for point in curve.points])
    return lines


def _curve(number: int, curve: Curve, places: list[tuple[float, float]]) -> list[str]:
    colour = _COLOURS[number]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    lines = [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{_DASHES[number]}"/>'
    ]
    for point, (x, y) in zip(curve.points, places, strict=True):
        about = (
            f"{curve.engine}, {point.label}: {point.interactivity:,.1f} tokens/s per user, "
            f"{point.throughput:,.0f} per GPU"
        )
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
            f"<title>{escape(about)}</title></circle>"
        )
        # The labels of two curves that are close to each other go to different sides.
        if number == 0:
            lines.append(_text(x + 6, y - 5, point.label, "start"))
        else:
            lines.append(_text(x - 6, min(y + 13, _HEIGHT - _BOTTOM - 4), point.label, "end"))
    return lines


def _ticks(largest: float) -> list[float]:
    """Round numbers from 0 to the first one that is not below `largest`."""
    raw = largest / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    return [step * i for i in range(math.ceil(largest / step - 1e-9) + 1)]


def _thousands(value: float) -> str:
    return f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'
