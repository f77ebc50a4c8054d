#!/usr/bin/env python3
"""Writes the seeds in tests/fuzz/corpus that need no fuzzer to find: one of each kind of input,
right and a little wrong.

They are committed, as are the inputs that fuzzing found worth keeping; this script is run again
when a format changes.
"""

import json
import pathlib
import re
import struct

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def write(target, name, content):
    folder = HERE / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def piece(content):
    return struct.pack("<H", len(content)) + content


# --- channel_frame: docs/channel.md

MAGIC = 0x31484B42


def frame(kind, body=b"", request_id=0, flags=0, version=1, size=None):
    return struct.pack("<IHHIIQQ", MAGIC, version, kind, size if size is not None else 32 + len(body), flags, request_id, 0) + body


def lease(slab, offset, size, lease_id):
    return struct.pack("<IIQQQ", slab, 0, offset, size, lease_id)


def tensor(name, dtype, dims, slab=1, offset=0, size=None, lease_id=1):
    count = 1
    for dim in dims:
        count *= dim
    strides, step = [], 1
    for dim in reversed(dims):
        strides.insert(0, step)
        step *= dim
    pad = lambda values: struct.pack("<8q", *values, *[0] * (8 - len(values)))
    return (struct.pack("<56sBBHI", name, dtype, len(dims), 0, 0) + lease(slab, offset, 4 * count if size is None else size, lease_id)
            + pad(dims) + pad(strides))


def infer(request_id, method=b"forward", tensors=(), parameters=b"", deadline=0):
    body = struct.pack("<64sIHHII", method, deadline, len(tensors), 0, len(parameters), 0) + b"".join(tensors) + parameters
    return frame(5, body, request_id)


HELLO = frame(1, struct.pack("<HHIQ48s16x", 1, 1, 0, 0, b"fuzz"))
FLOAT32 = 9
X = tensor(b"x", FLOAT32, [4])
NEW_SLAB = frame(3, struct.pack("<HHIQQ", 1, 1, 0, 8192, 0), 7)
RELEASE = frame(9, struct.pack("<II", 1, 0) + lease(2, 0, 16, 1))

channel = {
    "hello_infer_release": [HELLO, infer(1, tensors=[X], parameters=b'{"n":2}'), RELEASE],
    "two_in_flight_one_cancelled": [HELLO, infer(1, tensors=[X]), infer(2, tensors=[X]), frame(6, b"", 2)],
    "one_more_slab": [HELLO, NEW_SLAB, infer(8, tensors=[tensor(b"x", FLOAT32, [4], slab=3)])],
    "no_hello": [infer(1, tensors=[X])],
    "hello_twice": [HELLO, HELLO],
    "empty_packet": [b"", HELLO, b"", infer(1, tensors=[X]), b""],
    "length_of_all_ones": [frame(1, size=0xFFFFFFFF)],
    "foreign_slab": [HELLO, infer(1, tensors=[tensor(b"x", FLOAT32, [4], slab=99)])],
    "beyond_the_slab": [HELLO, infer(1, tensors=[tensor(b"x", FLOAT32, [4], offset=1 << 62)])],
    "dims_overflow": [HELLO, infer(1, tensors=[tensor(b"x", FLOAT32, [1 << 40, 1 << 40], size=16)])],
    "negative_dim": [HELLO, infer(1, tensors=[tensor(b"x", FLOAT32, [-4], size=16)])],
    "gpu_slab_asked": [HELLO, frame(3, struct.pack("<HHIQQ", 1, 2, 0, 8192, 0), 7)],
    "stale_release": [HELLO, RELEASE, RELEASE],
    "parameters_no_json": [HELLO, infer(1, tensors=[X], parameters=b'{"n":')],
    "worker_result": [frame(7, struct.pack("<HHIQQQ", 1, 0, 2, 1, 2, 0) + X + b"{}", 1, 1)],
    "worker_welcome": [frame(2, struct.pack("<HHIQQQQII64s", 1, 2, 4, 0, 1, 1, 1 << 20, 0, 2, b"echo") + b"{}")],
    "worker_offer": [frame(4, struct.pack("<IHHQ16x", 1, 1, 1, 4096))],
    "worker_error": [frame(8, struct.pack("<HHIII", 3, 0, 4, 4, 0) + b"whathow!", 1)],
    "worker_closing": [frame(10, struct.pack("<HHI", 3, 0, 100))],
}
for name, packets in channel.items():
    write("channel_frame", name, b"\0" + b"".join(map(piece, packets)))
    if name.startswith("worker"):
        write("channel_frame", name + "_parse", b"\1" + b"".join(map(piece, packets)))

# --- yaml: the good examples, with a file that is there on every machine

for path in sorted((ROOT / "tests/unit/config/fleets").glob("good/*.yaml")):
    write("yaml", f"good_{path.stem}", re.sub(rb"\.\./models/a\.pt2?", b"/proc/self/exe", path.read_bytes()))

# --- slab_header


def descriptor(kind, seals, size, output=0, claimed=None):
    head = struct.pack("<BBBIB", 0, kind, seals, size, output)
    return head + (b"\0" if claimed is None else struct.pack("<BQ", 1, claimed))


def page(seals, magic, steps, request, sequence=2):
    """Seals of the memfd, then the page: the futex word with its waiters' bit, and the
    members behind it."""
    content = struct.pack("<I", 0x80000000 | 4711) + bytes(60) + struct.pack("<IIQQI", magic, 0, steps, 1, sequence) + request
    return bytes([seals]) + content


SEALED = 0x1 | 0x2 | 0x4
FUTURE_WRITE = 0x10
for name, content in {
    "input": descriptor(4, SEALED, 4096) + lease(1, 0, 64, 1) + lease(1, 4032, 64, 1) + lease(1, 4032, 65, 1),
    "output": descriptor(4, SEALED | FUTURE_WRITE, 4096, 1) + lease(1, 64, 64, 1),
    "output_writable": descriptor(4, SEALED, 4096, 1),
    "unsealed": descriptor(4, 0, 4096),
    "no_size": descriptor(4, SEALED, 0),
    "lies_about_its_size": descriptor(4, SEALED, 4096, 0, 1 << 63),
    "dev_zero": descriptor(0, 0, 4096),
    "a_file": descriptor(1, 0, 4096),
    "a_pipe": descriptor(2, 0, 4096),
    "a_folder": descriptor(3, 0, 4096),
    "offset_overflow": descriptor(4, SEALED, 4096) + lease(1, (1 << 64) - 64, 128, 1),
    "allocator": b"\1" + struct.pack("<I", 4096) + (b"\0" + struct.pack("<Q", 100)) * 3 + b"\1\4"
                 + b"\2" + struct.pack("<QQQ", 0, 100, 1) + b"\2" + struct.pack("<QQQ", 64, 1, 9),
    "page_running": b"\2" + page(1, 0x47504B42, 7, b"forward(x f32[4])"),
    "page_torn": b"\2" + page(1, 0x47504B42, 7, b"forw", 3),
    "page_of_no_zero": b"\2" + page(1, 0x47504B42, 7, b"\x1b[31m" + b"x" * 1019),
    "page_no_magic": b"\2" + page(1, 0, 0, b""),
}.items():
    write("slab_header", name, content)

# --- argv_environment

strings = b"worker\0--socket\0/run/x\0A=1\0B=\0"
for name, content in {
    "spawn": b"\0" + struct.pack("<IIBI", 3, 2, 0, 0) + strings,
    "spawn_counts_wrong": b"\0" + struct.pack("<IIBI", 9, 2, 0, 0) + strings,
    "spawn_counts_overflow": b"\0" + struct.pack("<IIBI", 0xFFFFFFFF, 6, 0, 0) + strings,
    "spawn_size_wrong": b"\0" + struct.pack("<IIBI", 3, 2, 1, 4) + strings,
    "spawn_unterminated": b"\0" + struct.pack("<IIBI", 1, 0, 0, 0) + b"worker",
    "identity": b"\1token:silero-vad/0#17",
    "identity_with_colons": b"\1t:a:b/c/4#18446744073709551615",
    "identity_cut": b"\1token:model/",
    "environ": b"\2" + piece(b"BULKHEAD_WORKER") + b"PATH=/bin\0BULKHEAD_WORKER=t:m/0#1\0LAST=1",
    "environ_prefix": b"\2" + piece(b"A") + b"AB=1\0=A=2\0A\0A=3",
    "cli_up": b"\3--socket\0/tmp/s\0up\0fleet.yaml\0",
    "cli_infer": b"\3infer\0minilm\0--input\0x=[1,2]\0--param\0k=v\0--repeat\x003\0--json\0",
    "cli_logs": b"\3logs\0a\0-f\0--lines\0007\0",
    "cli_load_all": b"\3load\0--all\0",
    "cli_help": b"\3infer\0--help\0",
    "cli_wrong": b"\3frobnicate\0--json\0",
}.items():
    write("argv_environment", name, content)

# --- ancillary_fds: how, then (count, kind, bytes) of each packet


def packet(count, kind, content=b"hello"):
    return bytes([count, kind]) + piece(content)


keeper_request = struct.pack("<HHIQ", 37, 1, 16, 0)
for name, content in {
    "none": b"\0" + packet(0, 0),
    "one_memfd": b"\0" + packet(1, 3),
    "sixteen": b"\0" + packet(16, 0),
    "seventeen": b"\0" + packet(17, 0) + packet(1, 1),
    "as_many_as_the_kernel_takes": b"\0" + packet(253, 0) + packet(0, 0),
    "hello_with_253": b"\x08" + packet(253, 0) + packet(253, 1),
    "descriptors_run_out": b"\x42" + packet(16, 0) + packet(3, 0),
    "empty_with_descriptor": b"\0" + packet(1, 2, b"") + packet(0, 0, b"") + packet(0, 0),
    "sender_gone": b"\4" + packet(1, 3) + packet(0, 0, b""),
    "with_credentials": b"\0" + packet(2, 0x80),
    "keeper_one": b"\1" + packet(1, 0, keeper_request),
    "keeper_many": b"\1" + packet(9, 0, keeper_request) + packet(0, 0, keeper_request),
    "keeper_scarce": b"\3" + packet(2, 0, keeper_request),
    "long": b"\0" + packet(0, 0, b"x" * 65535),
}.items():
    write("ancillary_fds", name, content)

# --- adoption_state: docs/keeper-link.md, docs/worker-link.md

hello = {"type": "hello", "protocol": [1, 1], "model": "a", "replica": 0, "generation": 7, "state": "ready", "channels": [1, 2], "page": True}
say = lambda message: piece(json.dumps(message).encode())


def keeper_packet(kind, body=b"", request=0):
    return piece(struct.pack("<HHIQ", kind, 1, 16 + len(body), request) + body)


key = struct.pack("<64sIIQ", b"a", 0, 0, 7)
keeper_hello = keeper_packet(1, struct.pack("<HHIQQQii", 1, 1, 1, 7, 2, 1, 1234, 0))
ledger = json.dumps({"v": 1, "declaration": "0123456789abcdef:0123456789abcdef", "device": "cpu"}).encode()
uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
now_ms = 1_700_000_000_000
most = (1 << 64) - 1
ledger_full = {  # each member that supervisor/replica/replica_record.cpp reads
    "v": 1, "declaration": "0123456789abcdef:unknown", "device": "cuda:15", "gpu": uuid, "cgroup": True, "eager": "capture hung for 5.0 s",
    "granted": True, "capture": True, "ready_ms": now_ms, "end_ms": now_ms, "abort": True, "escalation": 2, "host": most, "gpu_free": most,
    "tried": 2, "keep": True, "unload": True, "replacing": True, "quarantined": True, "over": True, "due_ms": now_ms, "restarts": 7,
    "requests": most, "errors": most, "crashes": [0, 0, 0, 299_999], "by_count": True, "withdrawn_ms": 299_999,
    "on_gpu": [uuid, now_ms - 9_000, 4_000, "GPU-b", 5_000, -1],
    "crash": {"gen": 41, "pid": 5239, "sig": 6, "ms": now_ms, "cause": "it does not answer", "file": "1700000000000-m-0-41.json", "due": True,
              "lost": "No space left"},
    "reason": "forward ran 31 s, budget 30 s"}
ledger_quick = {**{name: ledger_full[name] for name in ("v", "gpu", "on_gpu", "crashes", "by_count", "withdrawn_ms")}, "crash": {"code": 3}}
record = lambda fate=0: keeper_packet(2, key + struct.pack("<iIiIQII", 99999, fate, 9, len(ledger), 1, 1, 0) + ledger)


def saved_worker(state_number, fd):
    return (key + struct.pack("<iIIiIIiiiIQq", 4711, state_number, 0 if state_number == 1 else 2, 0 if state_number == 1 else 9, 0, 0,
                              fd, fd + 1 if fd > 0 else -1, fd + 2 if fd > 0 else -1, len(ledger), 1, 0) + ledger)


def state(workers, version=1, count=None):
    path = b"/run/x/control.sock"
    body = struct.pack("<iiiiQQQQII", 1234, 5, 6, 1, 7, 2, 1, 0, 0, len(path)) + path + b"".join(workers)
    return struct.pack("<8sIIIIQ", b"bulkhead", version, 56, 136, len(workers) if count is None else count, 32 + len(body)) + body


for name, content in {
    "ledger_empty": b"\0{}",
    "ledger_text": b"\0" + ledger,
    "ledger_full": b"\0" + json.dumps(ledger_full).encode(),
    "ledger_of_a_gpu": b"\0" + json.dumps(ledger_quick).encode(),
    "ledger_long": b"\0" + json.dumps({**ledger_full, **{name: 200 * "\x01" for name in ("declaration", "device", "gpu", "eager", "reason")},
                                       "crashes": 200 * [0], "crash": {"cause": 200 * '"', "lost": 200 * "\u00e4", "file": 200 * "f"}}).encode(),
    "ledger_long_uuid": b"\0" + json.dumps({"v": 1, "on_gpu": [130 * "u", 5]}).encode(),
    "ledger_times_that_add_up": b"\0" + json.dumps({"v": 1, "on_gpu": [50 * "a", (1 << 59) - 1, 50 * "b", (1 << 59) - 1],
                                                    "withdrawn_ms": (1 << 63) - 1, "crashes": 5 * [(1 << 63) - 1]}).encode(),
    "hello": b"\1" + say(hello),
    "hello_then_ready": b"\1" + say(hello) + say({"type": "ready", "load_ms": 1, "torch": "2", "device": "cpu", "graphs": {}}),
    "hello_wrong_types": b"\1" + say({**hello, "channels": ["x", -1, 1e400], "protocol": [1]}),
    "dying": b"\1" + say({"type": "dying", "signal": 11}) + say({"type": "backtrace", "signal": 11, "thread": "t", "frames": ["f"] * 9}),
    "keeper_hands_over": b"\2" + keeper_hello + record() + keeper_packet(3),
    "keeper_dead_worker": b"\2" + keeper_hello + record(1) + keeper_packet(3),
    "keeper_no_hello": b"\2" + record() + keeper_packet(3),
    "keeper_exited": b"\2" + keeper_hello + keeper_packet(3) + keeper_packet(6, key + struct.pack("<iIiI", 99999, 2, 9, 1)),
    "state_empty": b"\3" + state([]),
    "state_of_two": b"\3" + state([saved_worker(1, 10), saved_worker(3, -1)]),
    "state_of_a_later_release": b"\3" + state([], version=2),
    "state_counts_wrong": b"\3" + state([saved_worker(1, 10)], count=9),
}.items():
    write("adoption_state", name, content)
