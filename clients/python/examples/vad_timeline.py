"""Streams recorded speech through a voice activity model over one channel, and draws when
somebody speaks.

    python vad_timeline.py [--model silero-vad] [--save FILE] voice.wav [voice.wav …]

Needs numpy, for the resampling.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import wave
from pathlib import Path

try:
    import numpy as np
except ImportError:
    raise SystemExit("this example resamples with numpy: pip install numpy") from None

import bulkhead

RATE_HZ = 16_000
CHUNK = 512  # samples
PAUSE = RATE_HZ // 2  # samples between two files
CHUNKS_PER_COLUMN = 4  # 128 ms of sound
COLUMNS_PER_ROW = 78  # 10 s


def read_wav(path: str) -> tuple[np.ndarray, int]:
    """Mono samples in [-1, 1), and their rate."""
    try:
        with wave.open(path, "rb") as file:
            channels, rate = file.getnchannels(), file.getframerate()
            if file.getsampwidth() != 2 or channels not in (1, 2):
                raise wave.Error("16-bit PCM with one or two channels is read")
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, channels)
    except (OSError, EOFError, wave.Error) as error:
        raise SystemExit(f"reading {path}: {error or 'the file is truncated'}") from None
    return samples.sum(axis=1, dtype=np.float32) / np.float32(32768 * channels), rate


def resample(samples: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """By the part of the spectrum that both rates carry. The ends of a file are taken
    for neighbours."""
    if from_hz == to_hz:
        return samples
    count = -(-len(samples) * to_hz // from_hz)
    resampled: np.ndarray = np.fft.irfft(np.fft.rfft(samples)[: count // 2 + 1], count) * (count / len(samples))
    return resampled.astype(np.float32)


def read_audio(paths: list[str]) -> tuple[np.ndarray, list[tuple[str, int, int]]]:
    """All files behind one another with pauses between, and where each lies."""
    pieces: list[np.ndarray] = []
    parts = []
    length = 0
    for path in paths:
        samples = resample(*read_wav(path), RATE_HZ)
        if pieces:
            pieces.append(np.zeros(PAUSE, np.float32))
            length += PAUSE
        parts.append((Path(path).name, length, length + len(samples)))
        pieces.append(samples)
        length += len(samples)
    pieces.append(np.zeros(-length % CHUNK, np.float32))
    return np.concatenate(pieces), parts


class Timeline:
    """Draws the bar as the answers come: a row per file, and a new one after each 10 s."""

    BLOCKS = " ▁▂▃▄▅▆▇█"

    def __init__(self, parts: list[tuple[str, int, int]], threshold: float) -> None:
        self.parts, self.threshold = parts, threshold
        self.next_part = self.columns = self.chunks = 0
        self.loudest = 0.0

    def add(self, chunk: int, probability: float) -> None:
        sample = chunk * CHUNK
        if self.next_part < len(self.parts) and sample + CHUNK > self.parts[self.next_part][1]:
            self.end_row()
            print(self.parts[self.next_part][0])
            self.next_part += 1
        elif self.columns == COLUMNS_PER_ROW:
            self.end_row()
        if self.columns == 0 and self.chunks == 0:
            print(f"{sample / RATE_HZ:7.2f} s  ", end="")
        self.loudest = max(self.loudest, probability)
        self.chunks += 1
        if self.chunks == CHUNKS_PER_COLUMN:
            self.draw_column()

    def draw_column(self) -> None:
        block = self.BLOCKS[math.floor(min(max(self.loudest, 0.0), 1.0) * 8 + 0.5)]
        if sys.stdout.isatty():
            block = f"\033[{32 if self.loudest >= self.threshold else 90}m{block}\033[0m"
        print(block, end="", flush=True)
        self.columns += 1
        self.chunks, self.loudest = 0, 0.0

    def end_row(self) -> None:
        if self.chunks > 0:
            self.draw_column()
        if self.columns > 0:
            print()
        self.columns = 0


def speech_segments(probabilities: list[float], threshold: float) -> list[tuple[int, int]]:
    """The rule and the defaults of silero-vad's get_speech_timestamps, without its bound on a
    segment's length."""
    min_speech, min_silence, pad = 4000, 1600, 480
    lower = max(threshold - 0.15, 0.01)
    length = CHUNK * len(probabilities)
    found: list[tuple[int, int]] = []
    start = silent_since = -1
    for index, probability in enumerate(probabilities):
        now = CHUNK * index
        if probability >= threshold:
            silent_since = -1
            if start < 0:
                start = now
        elif probability < lower and start >= 0:
            if silent_since < 0:
                silent_since = now
            if now - silent_since >= min_silence:
                if silent_since - start > min_speech:
                    found.append((start, silent_since))
                start = silent_since = -1
    if start >= 0 and length - start > min_speech:
        found.append((start, length))
    # Twice the padding is less than a silence.
    return [(max(0, first - pad), min(length, last + pad)) for first, last in found]


def main() -> int:
    parser = argparse.ArgumentParser(description="Streams speech through a voice activity model in chunks of 32 ms and draws when somebody speaks.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="16-bit PCM WAV, mono or stereo, any rate; joined with pauses of 0.5 s")
    parser.add_argument("--model", default="silero-vad", help="a model of the fleet with silero-vad's interface")
    parser.add_argument("--socket", help="the daemon's control socket; else as `bulkhead` finds it")
    parser.add_argument("--threshold", type=float, default=0.5, help="probability from which on a chunk is speech")
    parser.add_argument("--save", help="write one probability a line to this file")
    parser.add_argument("--dump-audio", help="write the samples as streamed: 16 kHz, float32, little-endian")
    parser.add_argument("--realtime", action="store_true", help="send each chunk when a microphone would have it")
    options = parser.parse_args()

    samples, parts = read_audio(options.files)
    timeline = Timeline(parts, options.threshold)
    probabilities: list[float] = []
    latencies: list[float] = []
    longest_gap = 0.0
    start = last = time.perf_counter()
    if options.dump_audio:
        samples.tofile(options.dump_audio)
    try:
        with bulkhead.connect(options.socket, name="vad_timeline.py") as daemon, daemon.open(options.model) as channel:
            # Leased once, filled again for each chunk.
            with channel.allocate((1, CHUNK), "float32") as x:
                room = x.numpy()
                for index, chunk in enumerate(samples.reshape(-1, CHUNK)):
                    if options.realtime:  # a chunk is complete when its last sample is recorded
                        time.sleep(max(start + (index + 1) * CHUNK / RATE_HZ - time.perf_counter(), 0))
                    room[0] = chunk
                    asked = time.perf_counter()
                    reply = channel.infer(x=x, sr=RATE_HZ)
                    now = time.perf_counter()
                    if index > 0:
                        longest_gap = max(longest_gap, now - last)
                    last = now
                    latencies.append(now - asked)
                    probabilities.append(float(next(iter(reply.values())).numpy().reshape(-1)[0]))
                    timeline.add(index, probabilities[-1])
                del room
    except bulkhead.Error as error:
        print(f"vad_timeline.py: {error}", file=sys.stderr)
        return 1
    timeline.end_row()

    segments = speech_segments(probabilities, options.threshold)
    for name, first, end in parts:
        inside = "".join(f"  {a / RATE_HZ:.2f}-{b / RATE_HZ:.2f} s" for a, b in segments if b > first and a < end)
        print(f"speech in {name}:{inside or '  none'}")
    latencies.sort()
    p50, p99 = (latencies[(len(latencies) - 1) * percent // 100] * 1000 for percent in (50, 99))
    print(f"{len(probabilities)} chunks, {len(samples) / RATE_HZ:.2f} s of sound; latency p50 {p50:.3f} ms, p99 {p99:.3f} ms; "
          f"longest gap between answers {longest_gap * 1000:.3f} ms")  # fmt: skip
    if options.save:
        Path(options.save).write_text("".join(f"{value:.9g}\n" for value in probabilities))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
