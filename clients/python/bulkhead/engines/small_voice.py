"""A small voice that needs no files: a recurrent network whose weights are drawn from a fixed seed.

It babbles: a letter sounds the same between the same neighbours, and no word is intelligible. Like
a real speech model, it streams, runs one step per millisecond of sound and uses ``context.graph``.
Demos and tests use it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor as Array
from torch import nn

from ..engine import Context, Integer, InvalidInput, Number, Result, Tensor, Text, method

RATE = 24000
STEP = 24  #: samples of one step: a millisecond
LETTER_STEPS = 80  #: at speed 1
PART_STEPS = 200
LETTERS_MAX = 4096
HARMONICS, WIDTH, STATE = 16, 64, 128
PITCH_LOW, PITCH_HIGH = 60.0, 400.0


class Network(nn.Module):
    """Converts letters to sound. Every size of ``step`` is fixed, so that it can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(256, WIDTH)
        self.neighbours = nn.Conv1d(WIDTH, WIDTH, 5, padding=2)
        self.cell = nn.GRUCell(WIDTH + HARMONICS, STATE)
        self.heads = nn.Linear(STATE, HARMONICS + 1)
        generator = torch.Generator().manual_seed(24)
        for weight in self.parameters():
            spread = 2 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.1
            nn.init.normal_(weight, std=spread, generator=generator)
        self.samples = nn.Buffer(torch.arange(1, STEP + 1))
        self.numbers = nn.Buffer(torch.arange(1, HARMONICS + 1))

    def read(self, text: bytes) -> Array:
        """Encodes each letter with its neighbours: [letters, WIDTH]."""
        embedded = self.letters(torch.tensor(list(text), device=self.samples.device))
        return torch.tanh(self.neighbours(embedded.T[None]))[0].T

    def step(self, letter: Array, loudness: Array, pitch: Array, state: Array, phase: Array, levels: Array) -> tuple[Array, ...]:
        """letter [1, WIDTH], loudness [1] from 0 to 1, pitch [1] in Hz, state [1, STATE], phase [1]
        in radians, and the last step's levels [1, HARMONICS], to samples [STEP] and the next state,
        phase and levels."""
        state = self.cell(torch.cat([letter, levels], dim=1), state)
        heads = self.heads(state)
        target = loudness * torch.sigmoid(3 * heads[:, 1:]) / self.numbers
        hertz = pitch * torch.exp2(0.4 * torch.tanh(heads[:, 0]))
        phases = phase + 2 * math.pi / RATE * hertz * self.samples
        following = levels + 0.2 * (target - levels)
        # [HARMONICS, STEP]: no jump between two steps.
        heard = torch.lerp(levels.T, following.T, self.samples / STEP)
        sound = 0.3 * (heard * torch.sin(self.numbers[:, None] * phases)).sum(dim=0)
        return sound, state, phases[-1:] % (2 * math.pi), following


class SmallVoice:
    """A small voice with weights of its own: it babbles, and needs no files."""

    def load(self, context: Context) -> None:
        self.device = context.device
        self.network = Network().to(self.device).eval()
        with torch.inference_mode():
            self.step = context.graph(self.network.step, [{"letter": self._zeros(1, WIDTH), "loudness": self._zeros(1), **self._start(140.0)}])

    @method(
        inputs=[Tensor("reference", "float32", ["1..2", "2400.."], optional=True, description="a voice, whose pitch is taken")],
        parameters=[
            Text("text", multiline=True),
            Number("pitch", 140.0, low=PITCH_LOW, high=PITCH_HIGH, step=1, description="in Hz, where no reference is given"),
            Number("speed", 1.0, low=0.5, high=2.0, step=0.05),
            Integer("reference_rate", RATE, low=8000, high=192000, description="samples of the reference in a second"),
        ],
        outputs=[Tensor("audio", "float32", ["channels=1", "samples=0.."])],
    )
    @torch.inference_mode()
    def speak(self, *, text: str, pitch: float, speed: float, reference_rate: int, reference: Any = None) -> Generator[Result, None, Result]:
        """Speaks a text; streams a part for each fifth of a second of sound."""
        letters = text.strip().encode()
        if not 1 <= len(letters) <= LETTERS_MAX:
            raise InvalidInput(f"speaking a text of {len(letters)} bytes", f"give 1 to {LETTERS_MAX}")
        if reference is not None:
            pitch = pitch_of(torch.tensor(reference), reference_rate)
        started = time.monotonic()
        repeats = max(1, round(LETTER_STEPS / speed))
        spoken: list[Array] = []
        part: list[Array] = []
        read = self.network.read(letters)
        going = self._start(pitch)
        loud, silent = torch.ones(1, device=self.device), self._zeros(1)
        for index in range(len(letters) * repeats):
            at = index // repeats
            loudness = silent if letters[at : at + 1].isspace() else loud
            sound, state, phase, levels = self.step(letter=read[at : at + 1], loudness=loudness, **going)
            going.update(state=state, phase=phase, levels=levels)
            part.append(sound.clone())
            if len(part) == PART_STEPS:
                spoken.append(torch.cat(part)[None].cpu())
                part.clear()
                yield Result(audio=spoken[-1], values={"sample_rate": RATE})
        if part:
            spoken.append(torch.cat(part)[None].cpu())
            yield Result(audio=spoken[-1], values={"sample_rate": RATE})
        audio = torch.cat(spoken, dim=1)
        took = time.monotonic() - started
        values = {"sample_rate": RATE, "text": text, "pitch": pitch, "seconds": audio.shape[1] / RATE, "tokens_per_second": len(letters) * repeats / took}
        return Result(audio=audio, values=values)

    def _zeros(self, *shape: int) -> Array:
        return torch.zeros(shape, device=self.device)

    def _start(self, pitch: float) -> dict[str, Array]:
        """The initial state of a sentence, whatever was spoken before."""
        return {"pitch": self._zeros(1) + pitch, "state": self._zeros(1, STATE), "phase": self._zeros(1), "levels": self._zeros(1, HARMONICS)}


def pitch_of(sound: Array, rate: int) -> float:
    """Returns a voice's pitch in Hz from the first two seconds of sound float32
    [channels, samples]."""
    heard = sound.mean(dim=0)[: 2 * rate]
    spectrum = torch.fft.rfft(heard - heard.mean(), n=2 * heard.shape[0])
    likeness = torch.fft.irfft(spectrum.abs().square())  # autocorrelation, by shift in samples
    first = math.ceil(rate / PITCH_HIGH)
    lag = first + int(likeness[first : int(rate / PITCH_LOW) + 1].argmax())
    return rate / lag
