"""llama_cpp.py GGUF THREADS SLOTS: llama.cpp's server, in this process, a baseline of the
bench "reloads".

After its load it writes u64 0, or u64 N and N bytes: why it cannot take part. Then each u64 on
stdin asks for sequences, all at once, greedily: bits 0 to 15 are a prompt's length, 16 to 31 the
tokens of each, 32 to 39 how many. The answer is a round of rounds.h of two measurements:
microseconds to the first token of the first sequence, and to the end of all.

llama_cpp.py --float32 FROM TO makes of a quantised GGUF file one of the same numbers as float32."""

import itertools
import os
import struct
import sys
import threading
import time
from typing import Any, Callable

from rounds import processor_us


def as_float32(source: str, target: str) -> None:
    import gguf
    import numpy

    reader = gguf.GGUFReader(source)
    partial = target + ".partial"
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        value = 0 if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, target)


def served(file: str, threads: int, slots: int) -> Callable[[int, int, int], tuple[float, float]]:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.n_ctx = 2048 * slots
    parameters.n_parallel = slots
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)
    firsts = itertools.count(2000)

    def generate(length: int, count: int, heard: Callable[[], None]) -> None:
        # No two prompts begin alike, so none is known already.
        ids = [next(firsts), *range(1001, 1000 + length)]
        asked = {"prompt": ids, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "stream": True}
        answered: list[Any] = []

        def hear(part: Any) -> None:
            if not answered:
                heard()
            answered.append(part)

        server.handle_completions(asked, hear)
        if len(answered) < count:
            raise RuntimeError(f"llama.cpp gave {len(answered)} tokens of {count}: {answered[-1:]}")

    def request(length: int, count: int, sequences: int) -> tuple[float, float]:
        start = time.monotonic()
        first: list[float] = []
        others = [threading.Thread(target=generate, args=(length, count, lambda: None)) for _ in range(sequences - 1)]
        for other in others:
            other.start()
        generate(length, count, lambda: first.append(time.monotonic()))
        for other in others:
            other.join()
        return (first[0] - start) * 1e6, (time.monotonic() - start) * 1e6

    return request


def serve(file: str, threads: int, slots: int) -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # llama.cpp prints what it does
    os.dup2(quiet, 2)
    try:
        request = served(file, threads, slots)
    except Exception as error:  # told to the bench, which leaves llama.cpp out
        why = f"{type(error).__name__}: {error}".encode()
        answers.write(struct.pack("<Q", len(why)) + why)
        return
    answers.write(struct.pack("<Q", 0))
    while len(word := sys.stdin.buffer.read(8)) == 8:
        asked = struct.unpack("<Q", word)[0]
        begin, processor = time.monotonic(), processor_us()
        first, all_of_them = request(asked & 0xFFFF, asked >> 16 & 0xFFFF, asked >> 32)
        answers.write(struct.pack("<Q5d", 2, first, all_of_them, begin * 1e6, time.monotonic() * 1e6, processor_us() - processor))


if __name__ == "__main__":
    if sys.argv[1] == "--float32":
        as_float32(sys.argv[2], sys.argv[3])
    else:
        serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
