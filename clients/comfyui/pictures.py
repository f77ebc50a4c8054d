"""Pictures: memory before and after, and sound as it comes."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import sizes

WIDTH, BAR, GAP, LETTERS = 640, 56, 40, 15
BACK, FREE, USED, MODEL, INK = (24, 26, 31), (52, 56, 66), (92, 107, 140), (232, 145, 58), (225, 228, 235)


class Memory(NamedTuple):
    """A device's memory in bytes: all of it, what is used, and the part of that which the
    unloaded models hold."""

    device: str
    total: int
    used: int
    models: int


def before_and_after(devices: list[tuple[Memory, Memory]], text: str) -> Any:
    """An IMAGE [1, height, width, 3]: two bars for each device."""
    import numpy
    import torch
    from PIL import Image, ImageDraw, ImageFont

    bars = [bar for before, after in devices for bar in (("before", before), ("after", after))]
    picture = Image.new("RGB", (WIDTH, 2 * GAP + len(bars) * (BAR + GAP)), BACK)
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(LETTERS)
    draw.text((GAP, GAP // 4), text, fill=INK, font=font)
    for row, (when, memory) in enumerate(bars):
        top = 2 * GAP + row * (BAR + GAP)
        draw.text((GAP, top - LETTERS - 5), f"{when}: {sizes.text(memory.used)} of {sizes.text(memory.total)} used on {memory.device}, "
                  f"{sizes.text(memory.models)} by the model", fill=INK, font=font)  # fmt: skip
        draw.rectangle((GAP, top, WIDTH - GAP, top + BAR - 1), fill=FREE)
        scale = (WIDTH - 2 * GAP) / max(memory.total, 1)
        others = GAP + scale * max(memory.used - memory.models, 0)
        draw.rectangle((GAP, top, others, top + BAR - 1), fill=USED)
        if memory.models:
            draw.rectangle((others, top, max(others + scale * memory.models, others + 1), top + BAR - 1), fill=MODEL)
    return torch.from_numpy(numpy.array(picture, dtype=numpy.float32) / 255)[None]


def waveform(samples: Any) -> Any:
    """A PIL picture of sound [channels, samples]."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (WIDTH // 2, 2 * BAR), BACK)
    draw = ImageDraw.Draw(picture)
    loud = samples.abs().amax(dim=0)
    columns = min(picture.width, loud.shape[0])
    for at in range(columns):
        piece = loud[at * loud.shape[0] // columns : (at + 1) * loud.shape[0] // columns]
        half = max(1.0, float(piece.amax().clamp(max=1)) * BAR)
        draw.line((at, BAR - half, at, BAR + half), fill=MODEL)
    return picture
