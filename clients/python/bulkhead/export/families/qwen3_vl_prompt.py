"""Positions of Qwen3-VL's tokens: three rotary ones each, for time, height and width. Plain Python,
for clients too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def rope_positions(tokens: Sequence[int], grids: Iterable[tuple[int, int, int]], image_token: int, video_token: int) -> tuple[list[list[int]], int]:
    """Returns a prompt's `rope` [3, T], and the difference between later tokens' positions and
    their index.

    grids: (1, height, width) in merged patches for each picture in order, and for each moment of a
    video, which counts as a picture between timestamps.
    Errors: ValueError if the number of placeholders does not match the grids."""
    grids = iter(grids)
    rope: list[list[int]] = [[], [], []]
    at = index = 0
    while index < len(tokens):
        if tokens[index] not in (image_token, video_token):
            for row in rope:
                row.append(at)
            at += 1
            index += 1
            continue
        grid = next(grids, None)
        if grid is None:
            raise ValueError(f"the placeholder at {index} belongs to no picture")
        time, height, width = grid
        count = time * height * width
        if list(tokens[index : index + count]) != [tokens[index]] * count:
            raise ValueError(f"the picture at {index} is {time} x {height} x {width}, and there are fewer placeholders")
        for t in range(time):
            for y in range(height):
                for x in range(width):
                    for row, offset in zip(rope, (t, y, x), strict=True):
                        row.append(at + offset)
        at += max(height, width)
        index += count
    if next(grids, None) is not None:
        raise ValueError("there are more pictures than placeholders")
    return rope, at - len(tokens)
