"""plot.py BENCH.json IMAGE.svg: draws what the bench "channel" measured, with nothing but Python.

Left: the median round trip of one client over the payload's size. Right: requests a second over the
number of clients.
"""

import json
import math
import re
import sys
from collections import defaultdict
from typing import Iterable
from xml.sax.saxutils import escape

NAME = re.compile(r"(.+), (\d+ [KMG]?B) (and back|there, 4 B back), (\d+) clients?: (p50|throughput)$")
SIZES = {"64 B": 64, "1 MB": 1 << 20, "64 MB": 64 << 20, "1 GB": 1 << 30}
# Okabe and Ito: told apart by everybody.
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#e69f00")
GREY = "#777777"
WIDTH, HEIGHT = 430, 270  # of one panel's inside
MARGIN_X, MARGIN_Y = 86, 64

Series = dict[str, list[tuple[float, float]]]


def number(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"


def duration(us: float) -> str:
    return f"{us / 1e6:g} s" if us >= 1e6 else f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} µs"


class Panel:
    """Lines over two logarithmic axes."""

    def __init__(self, title: str, x_ticks: Iterable[tuple[float, str]], lines: Series, grey: Series, unit) -> None:  # type: ignore[no-untyped-def]
        self.title, self.lines, self.grey, self.unit = title, lines, grey, unit
        self.x_ticks = list(x_ticks)
        values = [y for line in (*lines.values(), *grey.values()) for _, y in line] or [1.0, 10.0]
        self.low, self.high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)

    def x(self, value: float) -> float:
        first, last = math.log(self.x_ticks[0][0]), math.log(self.x_ticks[-1][0])
        return (math.log(value) - first) / (last - first) * WIDTH

    def y(self, value: float) -> float:
        return HEIGHT - (math.log10(value) - self.low) / max(1, self.high - self.low) * HEIGHT

    def draw(self, colours: dict[str, str]) -> list[str]:
        svg = [f'<text x="0" y="-16" class="title">{escape(self.title)}</text>']
        for power in range(self.low, self.high + 1):
            y = self.y(10.0**power)
            svg.append(f'<line x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
                       f'<text x="-8" y="{y + 4:.1f}" class="left">{self.unit(10.0**power)}</text>')  # fmt: skip
        for value, label in self.x_ticks:
            svg.append(f'<text x="{self.x(value):.1f}" y="{HEIGHT + 20}" class="below">{label}</text>')
        for name, line in self.grey.items():
            svg += self.line(line, GREY, "5 4", name)
        for name, line in self.lines.items():
            svg += self.line(line, colours[name], "none", name)
        return svg

    def line(self, points: list[tuple[float, float]], colour: str, dashes: str, name: str) -> list[str]:
        places = [(self.x(x), self.y(y), y) for x, y in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"><title>{escape(name)}: {self.unit(float(f"{value:.3g}"))}'
                       f"</title></circle>" for x, y, value in places)  # fmt: skip
        return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes}"/>{dots}']


def main() -> None:
    rows = json.load(open(sys.argv[1], encoding="utf-8"))
    round_trip: dict[str, Series] = {"and back": defaultdict(list), "there, 4 B back": defaultdict(list)}
    baselines: dict[str, dict[str, dict[float, float]]] = {way: defaultdict(dict) for way in round_trip}
    rates: dict[tuple[str, str], Series] = defaultdict(lambda: defaultdict(list))
    names: list[str] = []
    for row in rows:
        if not (found := NAME.match(row["name"])):
            continue
        name, size, way, clients, what = found.groups()
        if name not in names:
            names.append(name)
        if what == "throughput":
            rates[size, way][name].append((int(clients), row["value"]))
        elif clients == "1":
            # So small a question is not smaller than its answer.
            ways = round_trip if size == "64 B" else {way: None}
            for one in ways:
                round_trip[one][name].append((SIZES[size], row["value"]))
                kind = "one memcpy" if "memcpy" in row["baseline"] else row["baseline"]
                baselines[one][kind][SIZES[size]] = row["baseline_value"]
    if not names:
        sys.exit("plot.py: nothing of the bench \"channel\" in there")
    colours = dict(zip(names, COLOURS))
    sizes = [(value, label) for label, value in SIZES.items()]
    crowd = [(1, "1 client"), (4, "4"), (16, "16")]
    grey = {way: {kind: list(points.items()) for kind, points in kinds.items()} for way, kinds in baselines.items()}
    panels = [
        Panel("Round trip, p50: the payload goes there and comes back", sizes, round_trip["and back"], grey["and back"], duration),
        Panel("Requests a second, 64 B", crowd, rates["64 B", "and back"], {}, number),
        Panel("Round trip, p50: it goes there, 4 B come back", sizes, round_trip["there, 4 B back"], grey["there, 4 B back"], duration),
        Panel("Requests a second, 64 MB there, 4 B back", crowd, rates["64 MB", "there, 4 B back"], {}, number),
    ]
    kinds = sorted({kind for kinds in grey.values() for kind in kinds})
    width, height = 2 * WIDTH + 3 * MARGIN_X, 2 * HEIGHT + 3 * MARGIN_Y + 30 + 20 * math.ceil((len(names) + len(kinds)) / 3)
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
           "<style>text{font:13px sans-serif;fill:#222}.title{font-weight:600}.left{text-anchor:end}.below{text-anchor:middle}"
           ".grid{stroke:#ddd}</style>", f'<rect width="{width}" height="{height}" fill="white"/>']  # fmt: skip
    for i, panel in enumerate(panels):
        x, y = MARGIN_X + (i % 2) * (WIDTH + MARGIN_X), MARGIN_Y + (i // 2) * (HEIGHT + MARGIN_Y + 20)
        svg += [f'<g transform="translate({x} {y})">', *panel.draw(colours), "</g>"]
    for i, name in enumerate([*names, *kinds]):
        x, y = MARGIN_X + (i % 3) * 320, 2 * HEIGHT + 2.6 * MARGIN_Y + 20 + 20 * (i // 3)
        colour, dashes = (colours[name], "none") if name in colours else (GREY, "5 4")
        svg.append(f'<line x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dashes}"/>'
                   f'<text x="{x + 34}" y="{y}">{escape(name)}</text>')  # fmt: skip
    with open(sys.argv[2], "w", encoding="utf-8") as image:
        image.write("\n".join([*svg, "</svg>", ""]))


if __name__ == "__main__":
    main()
