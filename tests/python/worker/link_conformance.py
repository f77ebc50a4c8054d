"""The daemon's end of a worker's link: the same exchanges, good and bad, with the workers in C++
and the worker in Python."""

from __future__ import annotations

import math
import mmap
import os
import signal
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from bulkhead import layout
from bulkhead.layout import ERROR_NAMES
from harness import SECONDS, Client, Worker

#: Of the page, as docs/worker-link.md has it. The first four bytes are the futex's word.
PAGE_BYTES, PAGE_MAGIC, PAGE_MAGIC_AT = 4096, 0x47504B42, 64
FUTEX_WAITERS, FUTEX_OWNER_DIED = 0x80000000, 0x40000000


class LinkConformance:
    """Of one kind of worker."""

    kind = ""
    own_descriptors = 1  #: of a hello, before those of channels: the page

    def worker(self, **how: object) -> Worker:
        worker = Worker(self.kind, **how)  # type: ignore[arg-type]
        self.addCleanup(worker.close)  # type: ignore[attr-defined]
        return worker

    def loaded(self, **how: object) -> Worker:
        worker = self.worker(**how)
        worker.load()
        return worker

    def test_the_first_hello_says_who_it_is_and_brings_the_page_which_shows_its_death(self) -> None:
        worker = self.worker()
        hello = worker.expect("hello")
        self.assertEqual([hello[name] for name in ("protocol", "model", "replica", "generation", "channels")], [[1, 1], "echo", 0, 7, []])
        self.assertEqual(hello["state"], {"configured": False, "phase": "starting", "in_flight": 0, "grant": "none"})
        self.assertTrue(hello["page"])
        self.assertNotIn("nonce", hello)
        self.assertNotIn("loaded", hello)
        client = worker.offer_channel()
        self.assertEqual(worker.expect("channel_refused")["code"], "model_loading")
        self.assertEqual(client.error(), ("model_loading", 0))
        self.assertEqual(os.fstat(worker.fds[0]).st_size, PAGE_BYTES)
        with self.assertRaises(PermissionError):  # type: ignore[attr-defined]
            mmap.mmap(worker.fds[0], PAGE_BYTES)  # writable
        page = mmap.mmap(worker.fds[0], PAGE_BYTES, prot=mmap.PROT_READ)
        self.assertEqual(struct.unpack_from("<I", page, PAGE_MAGIC_AT)[0], PAGE_MAGIC)
        self.assertEqual(struct.unpack_from("<I", page)[0], FUTEX_WAITERS | worker.process.pid, "held by its main thread")
        worker.process.kill()
        worker.process.wait(20)
        self.assertEqual(struct.unpack_from("<I", page)[0], FUTEX_WAITERS | FUTEX_OWNER_DIED)

    def test_ready_describes_the_methods_and_a_later_hello_repeats_it_with_the_channels(self) -> None:
        worker = self.worker()
        ready = worker.load()
        forward = ready["methods"]["forward"]
        self.assertEqual([(one["name"], one["dtype"], one["shape"]) for one in forward["inputs"]], [("x", "float32", ["0..16777216"])])
        self.assertEqual([one["name"] for one in forward["outputs"]], ["y"])
        worker.open_channel()
        self.assertEqual(worker.expect("channel_opened")["channel"], 1)
        received = len(worker.fds)
        worker.send("hello_asked", nonce=41)
        hello = worker.expect("hello")
        self.assertEqual((hello["nonce"], hello["channels"], hello["state"]["phase"]), (41, [1], "ready"))
        self.assertEqual(hello["loaded"]["methods"], ready["methods"])
        self.assertEqual(len(worker.fds) - received, self.own_descriptors + 1, "its own and the channel's end")

    def test_busy_and_idle_enclose_requests_statistics_count_and_what_is_no_message_is_ignored(self) -> None:
        worker = self.loaded()
        for packet in (b"", b"no JSON", b"[]", b'{"type": 7}', b'{"type": "unknown"}', b'{"type": "drain"}', b'{"type": "channel"}', b"{" * 4000):
            worker.link.send(packet)
        worker.send("channel", channel=4)  # without its descriptor
        worker.send("statistics_asked")
        self.assertEqual(worker.expect("statistics")["channels"], 0)
        client = worker.offer_channel()
        client.raw(b"")
        client.open(0)
        client.raw(b"")
        client.write([1.0] * 4)
        client.infer(1, client.tensor())
        client.result(1)
        self.assertEqual([worker.receive()["type"] for _ in range(3)], ["channel_opened", "busy", "idle"])
        client.infer(2, client.tensor("z"))
        self.assertEqual(client.error(), ("input_invalid", 2))
        worker.send("statistics_asked")
        told = worker.expect("statistics")
        self.assertEqual([told[name] for name in ("requests", "errors", "in_flight", "queued", "channels")], [2, 1, 0, 0, 1])
        self.assertEqual(told["ignored_frames"], 2)
        self.assertEqual(told["slabs"]["bytes"], 2 * 65536)
        self.assertIn("mode", told["graphs"])

    def test_a_request_that_ran_out_of_memory_is_told_before_its_answer(self) -> None:
        worker = self.loaded()
        client = worker.open_channel()
        client.infer(1, client.tensor("z"))
        self.assertEqual(client.error(), ("input_invalid", 1))
        client.write([math.inf])
        for count in (1, 2):
            client.infer(1 + count, client.tensor())
            self.ran_out(worker, client, 1 + count, count)
        worker.send("statistics_asked")
        told = worker.expect("statistics")
        self.assertEqual((told["errors"], told["out_of_memory"]), (3, 2))

    def ran_out(self, worker: Worker, client: Client, request: int, count: int) -> None:
        """The answer to this request, as of so many that have failed so."""
        head, body = client.expect("error")
        error = layout.ERROR.unpack(body)
        self.assertEqual((ERROR_NAMES[error["code"]], head["request_id"]), ("out_of_memory", request))
        remedy = body[layout.ERROR.size + error["attempt_bytes"] :].decode()
        self.assertTrue(remedy.startswith("send it again: on a device under `limits` the daemon makes more room for this model; if that fails, "), remedy)
        worker.link.settimeout(0)  # it has come
        self.assertEqual(worker.expect("statistics")["out_of_memory"], count)
        worker.link.settimeout(SECONDS)

    def test_a_load_that_fails_and_another_protocol_are_told_and_end_the_process(self) -> None:
        for protocol, code in ((1, "load_failed"), (2, "protocol_violation")):
            worker = self.worker(fails=protocol == 1)
            worker.expect("hello")
            worker.send("configure", model=worker.model, device="cpu", protocol=protocol)
            failed = worker.expect("failed")
            self.assertEqual(failed["code"], code)
            self.assertTrue(failed["attempt"])
            self.assertIn(worker.process.wait(20), (1, 78))

    def test_a_blank_is_told_who_it_is(self) -> None:
        worker = self.worker(born_as="_blank/0#7")
        hello = worker.expect("hello")
        self.assertEqual((hello["model"], hello["replica"], hello["generation"]), ("_blank", 0, 7))
        worker.send("configure", model=worker.model, device="cpu", protocol=1, replica=2, generation=9)
        worker.expect("ready")
        worker.send("hello_asked", nonce=5)
        hello = worker.expect("hello")
        self.assertEqual((hello["model"], hello["replica"], hello["generation"]), ("echo", 2, 9))

    def test_a_drain_says_closing_then_drained_and_ends_with_status_0(self) -> None:
        worker = self.loaded()
        client = worker.open_channel()
        client.write([-1.0, 2.0, 3.0, 4.0])
        client.infer(1, client.tensor())
        worker.expect("busy")
        late = worker.offer_channel()
        worker.send("drain", deadline_ms=10000)
        _, body = client.expect("closing")
        self.assertEqual(layout.CLOSING.unpack(body)["deadline_ms"], 10000)
        client.infer(2, client.tensor())
        self.assertEqual(client.error(), ("worker_draining", 2))
        late.hello()
        self.assertEqual(late.error(), ("worker_draining", 0))
        self.assertEqual(worker.expect("channel_refused")["code"], "worker_draining")
        client.let_go()
        self.assertEqual(client.result(1)[0], [1.0, 2.0, 3.0, 4.0])
        worker.expect("drained")
        self.assertEqual(worker.process.wait(20), 0)
        self.assertTrue(client.is_over())

    def test_sigterm_drains(self) -> None:
        worker = self.loaded()
        worker.process.send_signal(signal.SIGTERM)
        worker.expect("drained")
        self.assertEqual(worker.process.wait(20), 0)

    def test_the_end_of_the_link_ends_the_worker(self) -> None:
        for what in ("idle", "busy"):
            with self.subTest(what):  # type: ignore[attr-defined]
                worker = self.loaded()
                if what == "busy":
                    client = worker.open_channel()
                    client.hold()
                    client.infer(1, client.tensor())
                    worker.expect("busy")
                worker.link.shutdown(socket.SHUT_RDWR)
                self.assertEqual(worker.process.wait(20), 1)

    def test_its_parents_death_ends_it_in_the_middle_of_a_request(self) -> None:
        """Though the link stays open, as it does for a next supervisor."""
        with ThreadPoolExecutor(1) as parent:
            worker = parent.submit(self.loaded).result()
            client = worker.open_channel()
            client.hold()
            client.infer(1, client.tensor())
            worker.expect("busy")
        self.assertEqual(worker.process.wait(20), -signal.SIGKILL)
        self.assertTrue(client.is_over())

    def test_progress_of_a_load_comes_in_order_and_before_ready(self) -> None:
        worker = self.worker(generates=True, environment={"MINIMAL_LOAD_STEPS": "8"})
        worker.expect("hello")
        worker.send("configure", model=worker.model, device="cpu", protocol=1)
        told = []
        while (message := worker.receive())["type"] == "progress":
            told.append((message["phase"], message["done"], message["total"]))
        self.assertEqual(message["type"], "ready")
        self.assertIn("loading", [phase for phase, _, _ in told])
        for (phase, total), steps in groupby(told, lambda one: (one[0], one[2])):
            done = [step[1] for step in steps]
            self.assertEqual(done, sorted(set(done)), phase)
            self.assertLessEqual(done[-1], total, phase)
        worker.send("statistics_asked")
        self.assertEqual(worker.receive()["type"], "statistics")

    def test_channels_that_cannot_be_are_refused(self) -> None:
        worker = self.loaded(channel={"count": 1})
        first = worker.open_channel()
        worker.expect("channel_opened")
        again = worker.offer_channel(1)
        self.assertEqual(worker.expect("channel_refused")["code"], "protocol_violation")
        self.assertEqual(again.error(), ("protocol_violation", 0))
        second = worker.offer_channel()
        second.hello()
        self.assertEqual(second.error(), ("resources_exhausted", 0))
        self.assertTrue(second.is_over())
        self.assertEqual(worker.expect("channel_refused")["code"], "resources_exhausted")
        first.close()
        self.assertEqual(worker.expect("channel_closed")["channel"], 1)
