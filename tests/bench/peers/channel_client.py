"""channel_client.py SOCKET MODEL BYTES: the Python client of the channel bench."""

import sys

import bulkhead
from rounds import serve_rounds


def main() -> None:
    socket, model, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with bulkhead.connect(socket, name="bench-py") as client:
        channel = client.open(model)
        x = channel.allocate((size,), "uint8")
        data = memoryview(x.data)
        for at in range(0, size, 1 << 20):
            data[at : at + (1 << 20)] = b"\1" * min(1 << 20, size - at)

        def request() -> None:
            reply = channel.infer(x=x)
            (y,) = reply.values()
            if memoryview(y.data)[-1] != 1:
                raise ValueError("a wrong answer")
            y.release()

        serve_rounds(3, request)


if __name__ == "__main__":
    main()
