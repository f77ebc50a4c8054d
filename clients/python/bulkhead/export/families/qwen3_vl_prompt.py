"""Where Qwen3-VL's tokens stand: three rotary positions each, for time, height and width. Plain Python, for clients too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def rope_positions(tokens: Sequence[int], grids: Iterable[tuple[int, int, int]], image_token: int, video_token: int) -> tuple[list[list[int]], int]:
    """`rope` [3, T] of a prompt, and what its further tokens' positions differ by from their index.

    grids: of each picture in order, and of each moment of a video, which are pictures of their own between timestamps:
    (1, height, width) in merged patches.
    Errors: ValueError, where the placeholders are not as many as the grids say."""
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
