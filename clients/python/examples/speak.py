"""Speaks a text with a model that streams speech, and writes the sound into a file as it comes.

    python speak.py [--model small-voice] [--param pitch=180]… [--reference voice.wav] "A
        text." sound.wav

What came before an error is in the file. Needs nothing but the client.
"""

from __future__ import annotations

import argparse
import array
import json
import time
import wave
from typing import Any, Iterable

import bulkhead


def pcm(samples: memoryview) -> bytes:
    """float32 from -1 to 1 as 16-bit PCM."""
    return array.array("h", (round(32767 * max(-1.0, min(1.0, value))) for value in samples.cast("f"))).tobytes()


def read_wav(path: str) -> tuple[list[list[float]], int]:
    """float32 [channels, samples] and the rate of a file of 16-bit PCM."""
    with wave.open(path, "rb") as file:
        if file.getsampwidth() != 2:
            raise SystemExit(f"reading {path}: only 16-bit PCM is read")
        values = [value / 32768 for value in array.array("h", file.readframes(file.getnframes()))]
        return [values[channel :: file.getnchannels()] for channel in range(file.getnchannels())], file.getframerate()


def write_parts(parts: Iterable[bulkhead.Reply], path: str) -> dict[str, Any]:
    """Writes each part when it comes; returns the values of the whole answer."""
    started = time.monotonic()
    seconds = 0.0
    with wave.open(path, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24000)
        for part in parts:
            if not part.more:
                return part.values_json
            if "audio" not in part:  # progress
                continue
            if not seconds:
                print(f"the first sound after {1000 * (time.monotonic() - started):.0f} ms", flush=True)
                file.setframerate(part.values_json["sample_rate"])
            sound = part["audio"]
            file.writeframes(pcm(sound.data)[: 2 * sound.shape[1]])  # the first channel
            seconds += sound.shape[1] / part.values_json["sample_rate"]
            print(f"{seconds:.1f} s spoken", flush=True)
    raise SystemExit("the answer had no end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small-voice")
    parser.add_argument("--param", action="append", default=[], metavar="NAME=JSON", help="of the model, as `bulkhead info --model` lists them")
    parser.add_argument("--reference", metavar="WAV", help="a voice to speak with")
    parser.add_argument("text")
    parser.add_argument("wav")
    options = parser.parse_args()
    parameters = {name: json.loads(value) for name, _, value in (given.partition("=") for given in options.param)}
    inputs = {}
    if options.reference:
        inputs["reference"], parameters["reference_rate"] = read_wav(options.reference)
    try:
        with bulkhead.connect() as b:
            values = write_parts(b.stream(options.model, inputs, method="speak", parameters={"text": options.text, **parameters}), options.wav)
    except bulkhead.Error as error:
        raise SystemExit(str(error)) from None
    print(", ".join(f"{name} {value}" for name, value in values.items()))


if __name__ == "__main__":
    main()
