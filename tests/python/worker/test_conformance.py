"""The same exchanges, good and bad, with the workers in C++ and the worker in Python."""

from __future__ import annotations

import os
import resource
import signal
import struct
import tempfile
import unittest
from pathlib import Path

from bulkhead import layout
from bulkhead.layout import DIRECTION, FEATURE, LIMITS, MESSAGE
from exchanges import BEFORE_HELLO, BREAKING, MESSAGES, REFUSED, UNAGREED, Exchange, lend, sealed
from harness import BUILD, PROGRAMS, PROMPT, Client, Worker, ask_slab
from link_conformance import LinkConformance

MANY = 30_000  #: tokens, which take seconds where they cannot be held
FAKE_CUDART = BUILD / "lib/fake_cudart/libcuda.so.1"


class Streams(LinkConformance):
    """Streamed answers too, of the model of each kind of worker."""

    def streaming(self, **how: object) -> tuple[Worker, Client]:
        worker = self.loaded(generates=True, **how)
        client = worker.open_channel(FEATURE["streaming"])
        self.assertEqual(client.welcome["features"], FEATURE["streaming"])
        return worker, client

    def generates(self, client: Client, number: int, count: int) -> None:
        client.generate(number, count)
        streamed, whole = client.parts(number, [])
        self.assertEqual((streamed, len(whole)), (whole, count))

    def test_parts_come_in_order_then_the_whole_which_a_client_without_streams_gets_alone(self) -> None:
        """Also to a client that reads late, and before that to another."""
        worker, late = self.streaming()
        late.generate(1, 1000)
        self.generates(worker.open_channel(FEATURE["streaming"]), 1, 4)
        streamed, whole = late.parts(1, [])
        self.assertEqual((streamed, len(whole)), (whole, 1000))
        other = worker.open_channel(0)
        other.generate(1, 16)
        self.assertEqual(other.parts(1, []), ([], whole[:16]))

    def test_a_cancel_amid_parts_is_the_last_word(self) -> None:
        _, client = self.streaming()
        client.generate(1, MANY, held=True)
        begun = client.part(1)
        client.send("cancel", number=1)
        self.assertEqual(client.parts(1, begun)[1], "cancelled")
        client.let_go(PROMPT)
        self.generates(client, 2, 4)  # nothing of the first comes after its end

    def test_a_client_that_leaves_amid_parts_ends_alone(self) -> None:
        worker, client = self.streaming()
        client.generate(1, MANY, held=True)
        client.part(1)
        client.close()
        client.let_go(PROMPT)
        self.assertEqual(worker.expect("channel_closed")["channel"], 1)
        self.generates(worker.open_channel(FEATURE["streaming"]), 1, 4)


class Channels(Streams):
    """All that a client may say on a channel: of the server, which has one model like another. Most
    tests are clients of one worker."""

    shared: Worker | None = None

    @classmethod
    def tearDownClass(cls) -> None:
        if cls.shared is not None:
            cls.shared.close()

    def client(self, features: int = FEATURE["returning"] | FEATURE["lending"]) -> Client:
        """Of a worker that others have had before."""
        if self.shared is None:
            type(self).shared = Worker(self.kind)
            self.shared.load()
        client = self.shared.open_channel(features)
        self.addCleanup(client.close)  # type: ignore[attr-defined]
        return client

    def test_welcome_agrees_and_offers(self) -> None:
        worker = self.loaded(queue=8)
        client = worker.open_channel(FEATURE["streaming"] | FEATURE["returning"])
        welcome = client.welcome
        self.assertEqual((welcome["version"], welcome["slab_count"], welcome["in_flight_max"]), (1, 2, 4))
        self.assertEqual((welcome["generation"], welcome["channel"], welcome["model"]), (7, 1, "echo"))
        self.assertEqual(welcome["features"], FEATURE["returning"])
        self.assertEqual(sorted(client.memory), [1, 2])

    def test_results_are_lent_until_they_are_released_once(self) -> None:
        client = self.client()
        client.write([1.0, 2.0, 3.0, 4.0])
        client.infer(1, client.tensor())
        values, lease = client.result(1)
        self.assertEqual(values, [1.0, 2.0, 3.0, 4.0])
        client.infer(2, client.tensor(dims=(0,)))
        empty, other = client.result(2)
        self.assertEqual(empty, [])
        self.assertNotEqual(lease["lease_id"], other["lease_id"])
        client.release(lease, other)
        client.release(lease)
        self.assertEqual(client.error(), ("protocol_violation", 0))
        self.lives(client)

    def test_a_slab_more_for_each_side(self) -> None:
        client = self.client()
        client.send("slab_request", ask_slab(DIRECTION["input"], 100_000), 9)
        offer = client.take_slab()
        self.assertEqual((offer["request_id"], offer["size_bytes"], offer["direction"]), (9, 102_400, DIRECTION["input"]))
        client.write([float(i) for i in range(25_000)])
        client.infer(1, client.tensor(dims=(25_000,)))  # more than the output slab has
        self.assertEqual(client.take_slab()["direction"], DIRECTION["output"])
        self.assertEqual(client.result(1)[0][-1], 24_999.0)

    def test_an_input_slab_that_was_returned_is_gone(self) -> None:
        client = self.client()
        client.send("slab_request", ask_slab(DIRECTION["input"], 4096), 9)
        first, offer = client.input, client.take_slab()
        client.send("slab_return", layout.SLAB_NAME.pack(slab_id=offer["slab_id"]))
        client.infer(1, client.tensor())
        self.assertEqual(client.error(), ("protocol_violation", 1))
        client.send("slab_return", layout.SLAB_NAME.pack(slab_id=offer["slab_id"]))
        self.assertEqual(client.error(), ("protocol_violation", 0))
        client.input = first
        self.lives(client)

    def test_an_idle_slab_is_withdrawn(self) -> None:
        client = self.loaded(channel={"idle": "50ms"}).open_channel()
        client.send("slab_request", ask_slab(DIRECTION["output"], 4096), 9)
        slab = client.take_slab()["slab_id"]
        client.infer(1, client.tensor())
        _, lease = client.result(1)
        client.release(lease)
        _, body = client.expect("slab_withdraw")
        self.assertEqual(layout.SLAB_NAME.unpack(body)["slab_id"], slab)
        client.send("slab_return", body)
        self.lives(client)

    def test_another_workers_output_is_read_where_it_lies(self) -> None:
        worker = self.loaded()
        taker = worker.open_channel()
        number = LIMITS["lent_slab_id_min"]
        fd = sealed([5.0, 6.0])
        taker.send("slab_lend", layout.SLAB_LEND.pack(slab_id=number, kind=1, size_bytes=4096), 3, [fd])
        os.close(fd)
        head, body = taker.expect("slab_accepted")
        self.assertEqual((head["request_id"], layout.SLAB_NAME.unpack(body)["slab_id"]), (3, number))
        taker.infer(4, taker.tensor(dims=(2,), slab=number))
        self.assertEqual(taker.result(4)[0], [5.0, 6.0])
        worker.send("statistics_asked")
        self.assertEqual(worker.expect("statistics")["slabs"]["bytes"], 2 * 65536, "it is not the worker's memory")
        taker.send("slab_return", body)
        taker.infer(5, taker.tensor(dims=(2,), slab=number))
        self.assertEqual(taker.error(), ("protocol_violation", 5))

    def test_a_loan_for_which_the_worker_has_no_free_descriptor_is_refused(self) -> None:
        worker = self.loaded()
        client, pid = worker.open_channel(), worker.process.pid
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), hard))
        loan = Exchange("a loan", lend(LIMITS["lent_slab_id_min"], 4096, lambda: sealed([1.0])), "resources_exhausted", 5)
        self.play(client, loan)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        loan.say(client)
        self.assertEqual(client.expect("slab_accepted")[0]["request_id"], 5)

    def test_the_queue_is_bounded_and_a_cancel_frees_a_place(self) -> None:
        worker = self.loaded(queue=4)
        client = worker.open_channel()
        client.hold(offset=64)
        for number in (1, 2, 3):
            client.infer(number, client.tensor(offset=64 * number))
        self.assertEqual(client.error(), ("queue_full", 3))
        other = worker.open_channel()
        other.send("cancel", number=1)  # it has no such request
        other.infer(1, method="backward")
        self.assertEqual(other.error(), ("method_unknown", 1))
        client.send("cancel", number=2)
        self.assertEqual(client.error(), ("cancelled", 2))
        client.send("cancel", number=1)  # which runs: answered at once
        self.assertEqual(client.error(), ("cancelled", 1))
        client.send("cancel", number=77)  # ignored
        client.let_go(offset=64)
        self.lives(client)

    def test_deadlines(self) -> None:
        client = self.client()
        client.hold()
        client.infer(1, client.tensor(), deadline_ms=50)
        client.infer(2, client.tensor(offset=64), deadline_ms=60)
        self.assertEqual({client.error(), client.error()}, {("deadline_exceeded", 1), ("deadline_exceeded", 2)})
        client.let_go()
        self.lives(client)

    def test_an_overrun_is_told(self) -> None:
        worker = self.loaded(request="1000ms")
        client = worker.open_channel()
        client.hold()
        client.infer(1, client.tensor(), deadline_ms=60_000)  # which is cut to the model's own
        self.assertEqual(client.error(), ("deadline_exceeded", 1))
        overrun = worker.expect("overrun")
        self.assertEqual((overrun["method"], overrun["budget_ms"]), ("forward", 1000))
        self.assertGreater(overrun["running_ms"], overrun["budget_ms"])
        client.let_go()

    def test_leases_in_flight_are_the_workers(self) -> None:
        client = self.client()
        client.hold()
        client.infer(1, client.tensor(dims=(32,), lease_id=50))
        # The very same one may be named again.
        client.infer(2, client.tensor(dims=(32,), lease_id=50))
        client.infer(3, client.tensor(offset=64))
        self.assertEqual(client.error(), ("protocol_violation", 3))
        client.infer(1, client.tensor(offset=256))
        self.assertEqual(client.error(), ("protocol_violation", 0))
        client.let_go()
        self.assertEqual((len(client.result(1)[0]), len(client.result(2)[0])), (32, 32))

    def test_one_fault_too_many_ends_the_channel(self) -> None:
        client = self.client()
        for _ in range(16):
            client.infer(1, client.tensor(slab=77))
            self.assertEqual(client.error(), ("protocol_violation", 1))
        client.infer(1, client.tensor(slab=77))
        self.assertEqual(client.error(), ("protocol_violation", 0))
        self.assertTrue(client.is_over())

    def test_a_client_that_does_not_read_ends_alone(self) -> None:
        deaf, other = self.client(), self.client()
        with self.assertRaises(BrokenPipeError):  # type: ignore[attr-defined]
            for number in range(1, 100_000):
                deaf.infer(number, deaf.tensor("z"))
        self.lives(other)

    # --- what clients say wrongly

    def test_what_breaks_the_protocol_ends_the_channel(self) -> None:
        worker = self.loaded()
        for features, exchanges in ((None, BEFORE_HELLO), (FEATURE["returning"] | FEATURE["lending"], BREAKING), (0, UNAGREED)):
            for exchange in exchanges:
                with self.subTest(exchange.name):  # type: ignore[attr-defined]
                    self.play(worker.offer_channel() if features is None else worker.open_channel(features), exchange)

    def test_what_cannot_be_is_refused_and_the_channel_lives(self) -> None:
        for exchange in REFUSED:
            with self.subTest(exchange.name):  # type: ignore[attr-defined]
                client = self.client()
                self.play(client, exchange)
                self.lives(client)
                client.close()

    def test_whatever_a_word_of_a_message_says_is_one_error_at_most_and_hurts_nobody(self) -> None:
        worker = self.loaded(channel={"count": 8})
        neighbour = worker.open_channel()
        for name, say in MESSAGES.items():
            at, size = 0, 1
            while at < size:
                for word in (bytes(4), b"\xff" * 4):
                    with self.subTest(f"{name}, byte {at}: {word.hex()}"):  # type: ignore[attr-defined]
                        client = worker.offer_channel() if name == "hello" else worker.open_channel()
                        say(client, (at, word))
                        size = client.sent_bytes
                        errors, is_over = self.heard(client, name == "hello")
                        self.assertLessEqual(errors, 1)
                        self.assertTrue(errors or not is_over, "the end came without a word")
                        client.close()
                at += 4
            self.lives(neighbour)

    def heard(self, client: Client, only_welcome: bool) -> tuple[int, bool]:
        """How many errors came before the answer to one more request, and whether the end came
        instead of that."""
        errors = 0
        try:
            if not only_welcome:
                client.infer(1000, client.tensor(offset=4096))
        except (BrokenPipeError, ConnectionResetError):
            pass
        while (received := client.receive()) is not None:
            head = received[0]
            errors += head["type"] == MESSAGE["error"]
            if head["type"] == MESSAGE["welcome"] or head["request_id"] == 1000:
                return errors, False
        return errors, True

    def play(self, client: Client, exchange: Exchange) -> None:
        exchange.say(client)
        self.assertEqual(client.error(), (exchange.code, exchange.request))
        if exchange.ends:
            self.assertTrue(client.is_over())
            client.close()

    def lives(self, client: Client) -> None:
        """It still serves, once an earlier request has ended."""
        client.write([7.0])
        client.infer(1000, client.tensor(dims=(1,)))
        self.assertEqual(client.result(1000)[0], [7.0])


class InCpp:
    def test_a_fatal_signal_is_told_at_once(self) -> None:
        worker = self.loaded()
        worker.process.send_signal(signal.SIGSEGV)
        self.assertEqual(worker.expect("dying")["signal"], signal.SIGSEGV)  # type: ignore[attr-defined]


class MinimalWorker(InCpp, Channels, unittest.TestCase):
    kind = "minimal"


@unittest.skipUnless(PROGRAMS["torch"].exists(), f"no {PROGRAMS['torch']}: this build is without LibTorch")
class TorchWorker(InCpp, Streams, unittest.TestCase):
    """Its server is the minimal worker's."""

    kind = "torch"

    @unittest.skipUnless(FAKE_CUDART.exists(), f"no {FAKE_CUDART}: this build is without a CUDA toolkit")
    def test_a_blank_on_a_gpu_says_hello_once_the_driver_gave_it_a_context(self) -> None:
        gpu = "GPU-00000000-0000-0000-0000-000000000001"
        fakes = {"LD_PRELOAD": str(FAKE_CUDART), "CUDA_VISIBLE_DEVICES": gpu, "BULKHEAD_FAKE_CUDA_GPUS": gpu}
        driver = {"BULKHEAD_LIBCUDA": str(BUILD / "lib/libbulkhead_fake_cuda.so")}
        self.worker(born_as="_blank/0#7", environment=fakes | driver).expect("hello")
        without = self.worker(born_as="_blank/0#7", environment=fakes | {"BULKHEAD_LIBCUDA": "/nowhere.so"})
        self.assertEqual(without.process.wait(20), 1)
        self.assertIn("no context on its GPU", without.process.stderr.read().decode())  # type: ignore[union-attr]


class PythonWorker(Channels, unittest.TestCase):
    kind = "python"
    own_descriptors = 2  #: the page, and the pipe that faulthandler writes to

    def worker(self, **how: object) -> Worker:
        """A blank imports torch, unless a test says otherwise an empty one."""
        if "born_as" in how and "environment" not in how:
            folder = self.enterContext(tempfile.TemporaryDirectory())
            Path(folder, "torch.py").touch()
            how["environment"] = {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        return super().worker(**how)

    def test_a_fatal_signal_is_told_at_once(self) -> None:
        worker = self.loaded()
        self.assertTrue(worker.hello["fault"])
        worker.process.send_signal(signal.SIGSEGV)
        with open(worker.fds.pop(1)) as fault:
            self.assertEqual(fault.readline(), "Fatal Python error: Segmentation fault\n")
            self.assertIn("Current thread 0x", fault.read())
        self.assertEqual(worker.process.wait(20), -signal.SIGSEGV)

    def test_a_blank_on_a_gpu_has_its_context_before_its_hello(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder, "made")
            Path(folder, "torch.py").write_text(f"class cuda:\n    def synchronize():\n        open({str(made)!r}, 'x')\n")
            path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
            self.worker(born_as="_blank/0#7", environment={"CUDA_VISIBLE_DEVICES": "GPU-0", "PYTHONPATH": path}).expect("hello")
            self.assertTrue(made.exists())

    def test_a_load_on_a_gpu_waits_for_its_grant(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            granted = Path(folder, "granted")
            worker = self.asking(granted)
            self.assertEqual(self.grant_of(worker), ("loading", "asked"))
            granted.touch()
            worker.send("grant")
            worker.expect("ready")
            self.assertEqual(self.grant_of(worker), ("ready", "given"))

    def test_memory_of_a_gpu_is_reported_as_torch_has_it(self) -> None:
        has = "is_initialized=lambda: False, memory_allocated=lambda: 1, memory_reserved=lambda: 2, max_memory_reserved=lambda: 3"
        with tempfile.TemporaryDirectory() as folder:
            granted = Path(folder, "granted")
            granted.touch()
            Path(folder, "torch.py").write_text(f"import types\ncuda = types.SimpleNamespace({has})\n")
            worker = self.asking(granted, {"torch": True}, {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"})
            worker.send("grant")
            worker.expect("ready")
        worker.send("statistics_asked")
        graphs = worker.expect("statistics")["graphs"]
        self.assertEqual([graphs[name] for name in ("allocated_bytes", "reserved_bytes", "peak_bytes")], [1, 2, 3])

    def asking(self, granted: Path, options: dict[str, bool] = {}, environment: dict[str, str] = {}) -> Worker:
        """Of a worker on a GPU, whose engine has not been loaded yet."""
        worker = self.worker(engine="OnAGpu", options={"granted": str(granted), **options}, environment=environment)
        worker.expect("hello")
        worker.send("configure", model=worker.model, device="cuda", protocol=1)
        self.assertEqual(worker.expect("grant_asked")["device_bytes"], 0)
        return worker

    @staticmethod
    def grant_of(worker: Worker) -> tuple[str, str]:
        worker.send("hello_asked", nonce=1)
        state = worker.expect("hello")["state"]
        return state["phase"], state["grant"]

    def test_a_part_in_a_new_slab_comes_after_the_offer_of_that_slab(self) -> None:
        _, client = self.streaming()
        # 2 MiB; none is given back.
        client.infer(1, client.tensor(dims=(8192,)), method="repeat", text=b'{"times": 64}')
        slabs = []
        while len(slabs) < 65:
            received = client.receive()
            assert received is not None
            if received[0]["type"] == MESSAGE["slab_offer"]:
                client.map_slab(*received)
            else:
                slabs.append(layout.TENSOR.unpack(received[1], layout.RESULT.size)["lease"]["slab_id"])
                self.assertIn(slabs[-1], client.memory)
        self.assertGreater(len(set(slabs)), 1)

    def test_a_stream_that_runs_out_of_memory_after_a_part_is_told(self) -> None:
        worker, client = self.streaming()
        client.generate(1, MANY, held=True)
        client.part(1)
        struct.pack_into("<q", client.memory[client.input], PROMPT, -1)
        self.ran_out(worker, client, 1, 1)
        self.generates(client, 2, 4)

    def test_a_drain_does_not_wait_for_a_load(self) -> None:
        worker = self.worker(engine="Loads")
        worker.expect("hello")
        worker.send("configure", model=worker.model, device="cpu", protocol=1)
        worker.expect("progress")
        worker.send("drain", deadline_ms=60_000)
        worker.expect("drained")
        self.assertEqual(worker.process.wait(20), 0)


if __name__ == "__main__":
    unittest.main()
