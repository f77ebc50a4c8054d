"""Writes the traces into a folder: who asked for which model, when. The seeds make them the
same each time.

    python3 make_traces.py FOLDER
"""

import random
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
# NAME: MiB, load ms, reclaim ms; of a card of 16 GiB.
MODELS = {
    "chat": (9_000, 4_000, 250), "code": (7_200, 3_400, 220), "vision": (6_100, 3_000, 200), "image": (8_300, 5_200, 250),
    "voice": (2_900, 1_500, 120), "ears": (1_700, 900, 90), "rank": (1_200, 600, 80), "embed": (600, 400, 60),
    "translate": (2_400, 1_300, 110), "music": (5_400, 2_800, 190),
}  # fmt: skip
Arrival = tuple[int, str, int]


def write(name: str, about: str, arrivals: list[Arrival], models: dict[str, str] | None = None) -> None:
    """`models`: those that are declared, and what follows their figures."""
    models = models or dict.fromkeys(MODELS, "")
    lines = [f"# {about}", "device 16384"]
    for model, rest in models.items():
        lines.append(" ".join(["model", model, *map(str, MODELS[model]), rest]).rstrip())
    lines += [f"{at} {model} {service}" for at, model, service in sorted(arrivals)]
    (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")


def zipf() -> list[Arrival]:
    dice, at, names = random.Random(1), 0.0, list(MODELS)
    dice.shuffle(names)
    weights = [1 / rank**1.1 for rank in range(1, len(names) + 1)]
    arrivals = []
    for _ in range(1_200):
        at += dice.expovariate(1 / 3_000)
        arrivals.append((int(at), dice.choices(names, weights)[0], dice.randint(100, 1_500)))
    return arrivals


def alternating() -> list[Arrival]:
    return [(i * 700, ("chat", "image")[i % 2], 150) for i in range(1_000)]


def bursts() -> list[Arrival]:
    dice, at, arrivals = random.Random(2), 0, []
    for _ in range(60):
        model = dice.choice(list(MODELS))
        for _ in range(dice.randint(5, 30)):
            at += dice.randint(20, 400)
            arrivals.append((at, model, dice.randint(50, 600)))
        at += dice.randint(2_000, 20_000)
    return arrivals


def day_and_night() -> list[Arrival]:
    """By day people talk, see and write code; by night documents are embedded and ranked; some
    of each always."""
    dice, at, arrivals = random.Random(3), 0.0, []
    day, night = ["chat", "ears", "voice", "vision", "code"], ["embed", "rank", "translate", "music", "image"]
    hour = 600_000  # a quarter of the day
    while at < 4 * hour:
        at += dice.expovariate(1 / 2_500)
        now, other = (day, night) if int(at / hour) % 2 == 0 else (night, day)
        model = dice.choice(now if dice.random() < 0.92 else other)
        arrivals.append((int(at), model, dice.randint(100, 1_200)))
    return arrivals


FOLDER.mkdir(exist_ok=True)
write("zipf", "Ten models, a few of them popular (Zipf, 1.1).", zipf())
write("alternating", "Two models that exclude each other, asked in turns.", alternating(),
      {"chat": "exclusive large", "image": "exclusive large"})  # fmt: skip
write("bursts", "One model after the other, 5 to 30 requests each.", bursts())
write("day-and-night", "Popular models change twice.", day_and_night())
