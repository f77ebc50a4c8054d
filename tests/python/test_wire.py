"""Every message, written by this client and read by the C++ codec, and the other way round: same
bytes, same meaning."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any, Iterator

import bulkhead
from bulkhead import layout
from bulkhead.layout import DIRECTION, FEATURE, FLAG, KIND, LIMITS, MESSAGE
from bulkhead.protocol import ChannelCore, packet
from bulkhead.shared_tensors import Arena
from fake_worker import METHODS, FakeWorker

SOURCE = Path(__file__).resolve().parents[2]
HANDLE = list(range(100, 164))
LEASE = {"slab_id": 2, "offset_bytes": 192, "size_bytes": 24, "lease_id": 1 << 40}
TENSOR = {"name": "y", "dtype": 9, "dims": [2, 3], "lease": LEASE, "event_id": 0}


def tensor(**members: Any) -> bytes:
    rank = {"rank": 2, "strides": [3, 1]}
    return layout.TENSOR.pack(**{**TENSOR, **rank, **members, "lease": layout.LEASE.pack(**LEASE)})


class Codec(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.process = subprocess.Popen([os.environ["BULKHEAD_WIRE_PACKETS"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        cls.addClassCleanup(cls.process.stdout.close)
        cls.addClassCleanup(cls.process.wait)
        cls.addClassCleanup(cls.process.stdin.close)

    def through(self, sender: str, data: bytes) -> dict[str, Any]:
        """What C++ reads in it; the same bytes must come back."""
        self.process.stdin.write(f"{sender} {data.hex()}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        self.assertFalse(answer.startswith("error"), answer)
        text, described = answer.split(" ", 1)
        self.assertEqual(bytes.fromhex(text), data, described)
        return json.loads(described)

    def refused(self, sender: str, data: bytes) -> str:
        self.process.stdin.write(f"{sender} {data.hex()}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        self.assertTrue(answer.startswith("error"), answer)
        return answer


class FromWorker(Codec):
    def test_each_message_is_read_as_it_was_written(self) -> None:
        methods, finish, lent = json.dumps(METHODS, separators=(",", ":")).encode(), b'{"finish":"stop"}', LIMITS["lent_slab_id_min"] + 3
        welcome = {"slab_count": 2, "in_flight_max": 64, "features": 60, "generation": 1 << 41, "channel": 77, "slab_bytes_max": 1 << 42,
                   "replica": 5, "model": "größer"}  # fmt: skip
        offer = {"slab_id": 9, "direction": 2, "kind": KIND["host_memfd"], "size_bytes": 1 << 33}
        on_gpu = {**offer, "kind": KIND["cuda_ipc"]}
        result = layout.RESULT.pack(tensor_count=2, json_bytes=len(finish), queued_us=11, run_us=12) + tensor() + tensor(name="z", event_id=4) + finish
        error = layout.ERROR.pack(code=10, attempt_bytes=3, remedy_bytes=5) + b"whyhelps"
        event = layout.EVENT_OFFER.pack(event_id=3, from_worker=1, handle=HANDLE)
        for kind, body, number, expected in (
            ("welcome", layout.WELCOME.pack(version=1, json_bytes=len(methods), **welcome) + methods, 0, {"methods": METHODS, **welcome}),
            ("slab_offer", layout.SLAB_OFFER.pack(**offer), 6, {"request_id": 6, "handle": bytes(64).hex(), **offer}),
            ("slab_offer", layout.SLAB_OFFER.pack(**on_gpu) + bytes(HANDLE), 6, {"request_id": 6, "handle": bytes(HANDLE).hex(), **on_gpu}),
            ("result", result, 8, {"request_id": 8, "more": True, "queued_us": 11, "run_us": 12, "values": {"finish": "stop"},
                                   "tensors": [TENSOR, {**TENSOR, "name": "z", "event_id": 4}]}),
            ("error", error, 8, {"request_id": 8, "code": "shape_mismatch", "attempt": "why", "remedy": "helps"}),
            ("closing", layout.CLOSING.pack(code=14, deadline_ms=1500), 0, {"code": "worker_draining", "deadline_ms": 1500}),
            ("slab_accepted", layout.SLAB_NAME.pack(slab_id=lent), 4, {"request_id": 4, "slab_id": lent}),
            ("slab_withdraw", layout.SLAB_NAME.pack(slab_id=3), 0, {"slab_id": 3}),
            ("event_offer", event, 0, {"event_id": 3, "from_worker": True, "handle": bytes(HANDLE).hex()}),
        ):  # fmt: skip
            with self.subTest(kind):
                self.assertEqual(self.through("worker", packet(kind, body, number, FLAG["more"] if kind == "result" else 0)), expected)

    def test_every_error_code(self) -> None:
        for code, name in layout.ERROR_NAMES.items():
            described = self.through("worker", packet("error", layout.ERROR.pack(code=code, attempt_bytes=1) + b"x", 1))
            self.assertEqual(described["code"], name)


class FromClient(Codec):
    """What the client itself has queued, not what a test packs."""

    def setUp(self) -> None:
        self.core = ChannelCore("größer")
        self.worker = FakeWorker()
        self.addCleanup(self.worker.client_end.close)
        self.addCleanup(self.worker.close)

    def open(self) -> None:
        self.core.receive(packet("welcome", layout.WELCOME.pack(version=1, slab_count=2, in_flight_max=4, slab_bytes_max=1 << 30, model="m",
                                                                features=FEATURE["lending"] | FEATURE["returning"])), [])  # fmt: skip
        for number, direction in ((1, "input"), (2, "output")):
            body = layout.SLAB_OFFER.pack(slab_id=number, direction=DIRECTION[direction], kind=KIND["host_memfd"], size_bytes=4096)
            self.core.receive(packet("slab_offer", body), [self.worker.memfd(4096, direction)])
        self.assertTrue(self.core.is_open, self.core.ended)
        self.core.outgoing.clear()

    def queued(self) -> dict[str, Any]:
        """What C++ reads in the next message to send."""
        data, _ = self.core.outgoing.popleft()
        return self.through("client", data)

    def test_hello_and_a_long_name_that_is_cut_between_characters(self) -> None:
        said = self.queued()
        self.assertEqual(said["client"], "größer")
        self.assertEqual(said["features"] & 8, FEATURE["streaming"])
        self.core = ChannelCore("ö" * 40)
        self.assertEqual(self.queued()["client"], "ö" * 23)

    def test_infer_and_cancel(self) -> None:
        self.open()
        room = self.core.slabs.try_allocate((2, 3), "float32")
        empty = self.core.slabs.try_allocate((0, 7), "int64")
        scalar = self.core.slabs.try_allocate((), "bfloat16")
        placed = [(name, self.core.slabs.own(one)) for name, one in (("a", room), ("b", empty), ("c", scalar))]
        request = self.core.submit("forward", placed, {"scale": 2}, 1.5, True)
        said = self.queued()
        self.assertEqual({key: said[key] for key in ("request_id", "method", "deadline_ms", "retry_safe", "parameters")},
                         {"request_id": request.number, "method": "forward", "deadline_ms": 1500, "retry_safe": True, "parameters": {"scale": 2}})  # fmt: skip
        self.assertEqual([(one["name"], one["dtype"], one["dims"], one["lease"]["size_bytes"]) for one in said["tensors"]],
                         [("a", 9, [2, 3], 24), ("b", 6, [0, 7], 0), ("c", 8, [], 2)])  # fmt: skip
        self.assertEqual({one["lease"]["slab_id"] for one in said["tensors"]}, {1})
        self.core.cancel(request)
        self.assertEqual(self.queued(), {"request_id": request.number})

    def test_a_request_like_the_last_one_costs_one_struct_call_a_message(self) -> None:
        self.open()
        room = self.core.slabs.try_allocate((2, 3), "float32")

        def request(number: int) -> bulkhead.Reply:
            placed = self.core.slabs.own(room)
            sent = self.core.submit("forward", [("x", placed)], {}, None, False)
            self.core.receive(results[number], [])
            return sent.parts.popleft()

        body = layout.RESULT.pack(tensor_count=3) + tensor(name="a") + tensor(name="b") + tensor(name="c")
        results = {number: packet("result", body, number) for number in (1, 2)}
        request(1)
        self.core.outgoing.clear()

        called: list[str] = []
        sys.setprofile(lambda frame, event, what: called.append(what.__qualname__) if event == "c_call" else None)
        try:
            reply = request(2)
        finally:
            sys.setprofile(None)

        self.assertEqual(len(self.core.outgoing), 2, "the release of the last results, and the request")
        self.assertEqual(called.count("Struct.pack"), 2, called)
        self.assertEqual([name for name in called if name.startswith("Struct.unpack")], ["Struct.unpack_from"])
        for name in ("bytes.partition", "bytes.decode", "str.encode", "memoryview.cast"):
            self.assertNotIn(name, called, "done once, or when it is asked for")
        self.assertIs(reply["a"].data, reply["a"].data)

    def test_slab_request(self) -> None:
        self.open()
        self.assertIsNone(self.core.slabs.try_allocate((10_000,), "uint8"))
        said = self.queued()
        self.assertEqual((said["direction"], said["kind"]), (1, 1))
        self.assertGreaterEqual(said["size_bytes"], 10_000)

    def test_release(self) -> None:
        self.open()
        described = {**LEASE, "offset_bytes": 64}
        output = self.core.slabs.output(layout.TENSOR.flat.unpack(
            layout.TENSOR.pack(name="y", dtype=9, rank=2, dims=[2, 3], strides=[3, 1], lease=layout.LEASE.pack(**described))), 0)  # fmt: skip
        output.release()
        del output
        gc.collect()
        self.core.settle()
        self.assertEqual(self.queued(), {"leases": [described]})

    def test_lending_and_returning(self) -> None:
        self.open()
        room = Arena().allocate((3,), "float32")
        loan = self.core.slabs.lend(room)
        assert loan is not None
        data, mapping = self.core.outgoing[0]
        self.assertIs(mapping, room.lease.region)
        said = self.queued()
        self.assertEqual((said["slab_id"], said["kind"], said["size_bytes"]), (LIMITS["lent_slab_id_min"], 1, mapping.size_bytes))
        self.core.receive(packet("slab_accepted", layout.SLAB_NAME.pack(slab_id=said["slab_id"]), said["request_id"]), [])
        mapping.retire()
        self.core.settle()
        self.assertEqual(self.queued(), {"slab_id": said["slab_id"]})


class Both(Codec):
    def test_each_message_type_is_known_to_this_file(self) -> None:
        only_in_rings = {"ring_offer", "on_socket"}  # which this client does not speak
        here = Path(__file__).read_text("utf-8")
        for name in set(MESSAGE) - only_in_rings:
            self.assertTrue(f'"{name}"' in here or f"def test_{name}" in here or name in ("infer", "cancel", "slab_lend", "slab_return"), name)

    def test_what_is_cut_short_is_refused_on_both_sides(self) -> None:
        whole = packet("result", layout.RESULT.pack(tensor_count=1) + tensor(), 8)
        for size in range(layout.HEADER.size, len(whole), 7):
            cut = layout.HEADER.pack(**{**layout.HEADER.unpack(whole), "size_bytes": size}) + whole[layout.HEADER.size : size]
            self.refused("worker", cut)
            core = ChannelCore("x")
            core._slab_count = 0
            core.receive(cut, [])
            self.assertEqual(core.ended.code, "protocol_violation")


class Page(unittest.TestCase):
    """docs/channel.md says what wire.json says: offsets, types, names, numbers."""

    TITLES = {"Tensor descriptor": "TensorDescriptor", "Lease": "LeaseRef", "result": "InferResult", "error": "ErrorBody",
              "slab_return": "SlabName", "slab_accepted": "SlabName", "slab_withdraw": "SlabName"}  # fmt: skip
    page = (SOURCE / "docs/channel.md").read_text("utf-8")
    spec = json.loads((SOURCE / "ipc/channel/wire.json").read_text("utf-8"))

    def sections(self) -> Iterator[tuple[str, list[tuple[int, str, str]]]]:
        """Each title, and the rows of offset, type and field below it."""
        title, rows = "", []
        for line in self.page.splitlines():
            if found := re.fullmatch(r"(?:#+ (.+)|\*\*(.+, \d+ bytes)\*\*|\*\*(Memory)\.\*\*.*)", line):
                yield title, rows
                title, rows = found[1] or found[2] or found[3], []
            elif found := re.match(r"\| (\d+) \| ([^|]+) \| ([^|]+) \|", line):
                rows.append((int(found[1]), found[2], found[3]))
        yield title, rows

    def test_each_message_and_struct_is_described_as_it_is(self) -> None:
        numbers, described = {"on_socket": int(re.search(r"\*\*on_socket\*\* \(type (\d+)\)", self.page)[1])}, set()
        for title, rows in self.sections():
            if not (found := re.match(r"(?:(\d+) )?([\w ]+), (?:(\d+) bytes|no body)", title)):
                continue
            number, name, size = found.groups()
            if number:
                numbers[name] = int(number)
            if size is None:
                continue
            struct = self.TITLES.get(name) or "".join(word.capitalize() for word in name.split("_"))
            with self.subTest(title):
                self.assertEqual(int(size), self.spec["structs"][struct]["size"])
                if rows or struct != "SlabName":  # one table serves three messages
                    described.add(struct)
                    self.assertEqual(rows, self.expected(struct))
        self.assertEqual(numbers, MESSAGE)
        self.assertEqual(described, set(self.spec["structs"]))

    def expected(self, struct: str) -> list[tuple[int, str, str]]:
        rows, at = [], 0
        for name, kind in self.spec["structs"][struct]["fields"]:
            rows.append((at, "lease" if kind == "LeaseRef" else kind, re.sub(r"^reserved\d$", "reserved", name)))
            base, _, count = kind.rstrip("]").partition("[")
            at += ({"char": 1, "LeaseRef": layout.LEASE.size}.get(base) or int(base[1:]) // 8) * int(count or 1)
        if struct == "SlabOffer":
            rows.append((at, f"u8[{LIMITS['ipc_handle_bytes']}]", "handle"))
        return rows

    def test_the_rings_memory(self) -> None:
        rings, said = self.spec["rings"], []
        (rows,) = [rows for title, rows in self.sections() if title == "Memory"]
        for at, kinds, names in rows[:-1]:
            for kind, name in zip(kinds.split(", "), names.split(", "), strict=True):
                said.append([name, kind, at])
                at += int(kind[1:]) // 8
        self.assertEqual(said, rings["fields"])
        self.assertEqual(rows[-1], (rings["header_bytes"], f"{rings['cell_bytes']} × cells_to_worker", "ring to the worker"))
        self.assertIn(f"is {rings['cell_bytes']} bytes: a u64 sequence, then {rings['payload_bytes']} bytes of payload", self.page)
        self.assertIn("for {packets} packets, {room} room; {left} it has left".format(**rings["asleep"]), self.page)

    def listed(self, before: str, after: str = "") -> dict[str, int]:
        """What `1 this, 2 that` says between the two."""
        found = re.search(rf"{before}((?:\d+ \w+,\s)*\d+ \w+){after}", self.page)
        assert found is not None, before
        return {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", found[1])}

    def test_the_numbers_of_names(self) -> None:
        self.assertEqual(self.listed("Codes: "), self.spec["enums"]["ErrorCode"])
        self.assertEqual(self.listed(r"dtype \| "), {"bool" if name == "boolean" else name: n for name, n in self.spec["enums"]["DType"].items()})
        self.assertEqual(self.listed(r"features \| "), FEATURE)
        self.assertEqual(self.listed(r"kind \| ", r" \|\n\| 4 "), KIND)
        self.assertEqual(self.listed(r"direction \| "), DIRECTION)
        self.assertIn("flags | {more} `more` (result), {retry_safe} `retry_safe` (infer) |".format(**FLAG), self.page)
        self.assertIn(f"magic | `0x{layout.MAGIC:08X}`", self.page)

    def test_the_limits(self) -> None:
        said = {"packet_bytes_max": r"one body, at most (\S+) bytes", "tensors_max": r"tensor_count \| 0 to (\S+) \|",
                "json_bytes_max": r"json_bytes \| 0 to (\S+) \|", "rank_max": r"rank \| 0 \(a scalar\) to (\S+) \|",
                "tensor_alignment": r"offset_bytes \| a multiple of (\S+) \|", "slabs_max": r"At most (\S+) slabs in one channel",
                "release_leases_max": r" count \| 0 to (\S+) \|", "ring_cells_min": r"a power of two, (\S+) to",
                "ring_cells_max": r"a power of two, \S+ to (\S+) \|", "packed_messages_max": r"up to (\S+) whole messages", "ipc_handle_bytes": r"of kind cuda_ipc (\S+) more",
                "name_bytes": r"char\[(\d+)\] \| name", "method_bytes": r"char\[(\d+)\] \| method"}  # fmt: skip
        for limit, text in said.items():
            with self.subTest(limit):
                found = re.search(text, self.page)
                assert found is not None, text
                self.assertEqual(int(found[1].replace(",", "")), LIMITS[limit])
        in_words = {"lent_slab_id_min": ("at least 2³¹", 1 << 31), "ring_offer_fds": ("24 bytes, three file descriptors", 3)}
        for limit, (text, number) in in_words.items():
            self.assertIn(text, self.page)
            self.assertEqual(number, LIMITS[limit])
        self.assertEqual(set(said) | set(in_words), set(LIMITS))


if __name__ == "__main__":
    unittest.main()
