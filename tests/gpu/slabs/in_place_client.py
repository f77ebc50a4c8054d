"""in_place_client.py SOCKET ROUNDS: requests to model `m` of in_place_test.cpp, whose inputs were allocated in the method's order in
an empty slab on GPU 0. Exits with 1 where a result is not what was sent."""

from __future__ import annotations

import array
import sys

import bulkhead
from bulkhead import cuda


def main() -> int:
    gpu = cuda.gpu(0)
    with bulkhead.connect(sys.argv[1]) as client, client.open("m", gpu=0) as channel:
        if not channel.results_on_gpu(64):
            return 1
        x = channel.allocate((1024,), "float32", on_gpu=True)
        ids = channel.allocate((5,), "int64", on_gpu=True)
        for turn in range(int(sys.argv[2])):
            sent = array.array("f", [float(turn + i) for i in range(1024)])
            numbers = array.array("q", [turn, 2, 3, 4, 5])
            gpu.copy(x.address, sent.buffer_info()[0], x.nbytes, 0)
            gpu.copy(ids.address, numbers.buffer_info()[0], ids.nbytes, 0)
            reply = channel.infer(x=x, ids=ids)
            if reply["y"].cpu().tolist() != sent.tolist() or reply["k"].cpu().tolist() != numbers.tolist():
                return 1
            del reply  # or the next one finds no room where the graph writes
    return 0


if __name__ == "__main__":
    sys.exit(main())
