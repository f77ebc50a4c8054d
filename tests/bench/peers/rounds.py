"""The client's side of what rounds.h says, for those in Python."""

import array
import resource
import struct
import sys
import time
from typing import Callable


def processor_us() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (usage.ru_utime + usage.ru_stime) * 1e6


def serve_rounds(warm_up: int, request: Callable[[], object]) -> None:
    """``request`` raises where it fails."""
    rounds, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        for _ in range(warm_up):
            request()
    except Exception as error:  # told to the bench, which leaves this client out
        why = str(error).encode()
        answers.write(struct.pack("<Q", len(why)) + why)
        answers.flush()
        return
    answers.write(struct.pack("<Q", 0))
    answers.flush()
    clock = time.monotonic
    while len(word := rounds.read(8)) == 8:
        budget = struct.unpack("<Q", word)[0] / 1e6
        processor = processor_us()
        measured = array.array("d")
        begin = last = clock()
        while last - begin < budget:
            request()
            now = clock()
            measured.append((now - last) * 1e6)
            last = now
        count = len(measured)
        measured.extend((begin * 1e6, last * 1e6, processor_us() - processor))
        answers.write(struct.pack("<Q", count) + measured.tobytes())
        answers.flush()
