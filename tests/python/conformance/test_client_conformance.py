"""What a worker says on a channel, right and wrong, and what each of the four clients makes of it:
the C++ and the Python one, blocking and on a loop. What clients say to workers is in
../worker/exchanges.py."""

from __future__ import annotations

import struct
import unittest
from typing import Any, Callable
from unittest import mock

from bulkhead import channel as blocking, layout
from bulkhead.aio import channel as aio_channel
from bulkhead.layout import FEATURE, FLAG, KIND, LIMITS
from client_players import Asyncio, Blocking, Cpp
from fake_worker import FakeWorker
from worker_exchanges import BAD_ANSWERS, BAD_SLABS, BAD_WELCOMES, Say

BROKEN = next(code for code, name in layout.ERROR_NAMES.items() if name == "protocol_violation")
BOTH = FEATURE["lending"] | FEATURE["returning"]


class Exchanges(unittest.TestCase):
    """Of one client; the four are at the end. The test says what the worker says, so all of
    it is in order."""

    waits_its_turn = False  #: beyond what may be in flight
    lends_of_the_dead = True  #: an output whose worker is gone, which could be copied as well

    make: Callable[[], Any]

    def setUp(self) -> None:
        self.client = type(self).make()
        self.addCleanup(self.client.close)  # after the workers', or it might wait for one

    def worker(self) -> FakeWorker:
        worker = FakeWorker()
        self.addCleanup(worker.close)
        return worker

    def opened(self, name: str = "a", **welcome: Any) -> FakeWorker:
        worker = self.worker()
        self.client.begin(f"open {name}", worker.client_end)
        worker.open(**welcome)
        self.says("ok fake 7")
        return worker

    def says(self, expected: str) -> None:
        """All of an answer; of an error its code, or that and a part of its words."""
        said = self.client.end().strip()
        code, _, words = expected.partition(" ")
        if code in ("ok", "more"):
            self.assertEqual(said, expected)
        else:
            self.assertEqual(said.partition(" ")[0], code, said)
            self.assertIn(words, said)

    def do(self, command: str, expected: str = "ok") -> None:
        self.client.begin(command)
        self.says(expected)

    def asked(self, worker: FakeWorker, request: str, tensor: str = "x", how: str = "", channel: str = "a") -> tuple[int, dict[str, Any]]:
        """Sends it: its number, and its tensor."""
        self.do(f"ask {channel} {request} {tensor} {how}")
        head, body = worker.expect("infer")
        (described,) = worker.tensors(body)
        return head["request_id"], described

    def asking(self, how: str = "", **welcome: Any) -> tuple[FakeWorker, int]:
        """A channel with the request `r` under way, whose input is `x`: the worker, and the
        request's number."""
        worker = self.opened(**welcome)
        self.do("put a x 1")
        return worker, self.asked(worker, "r", how=how)[0]

    def serves(self, worker: FakeWorker, channel: str = "a") -> None:
        self.do(f"put {channel} seven 7")
        number, tensor = self.asked(worker, "last", "seven", channel=channel)
        worker.answer(number, worker.floats(tensor), offset=8192, lease_id=99)
        self.do("get last", "ok 7")

    def gone(self, worker: FakeWorker) -> None:
        """The client has broken it off; what it had sent may come first."""
        try:
            while worker.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass

    # --- opening

    def test_a_worker_that_refuses_dies_or_says_nothing_in_place_of_the_opening(self) -> None:
        worker = self.begun()
        worker.error(0, 18, "it has its one client", "wait for it")
        self.says("busy it has its one client")
        self.gone(worker)
        for slabs in (None, 0, 1):
            with self.subTest(slabs):
                worker = self.begun()
                if slabs is not None:
                    worker.welcome()
                for number in range(1, (slabs or 0) + 1):
                    worker.offer(number, "input")
                worker.close()
                self.says("worker_lost")
        worker = self.begun("20")
        self.says("deadline_exceeded")
        self.gone(worker)

    def begun(self, milliseconds: str = "") -> FakeWorker:
        """One whose client has said hello."""
        worker = self.worker()
        self.client.begin(f"open a {milliseconds}", worker.client_end)
        worker.expect("hello")
        return worker

    def broken(self, say: Say, *before: str) -> None:
        """Opening fails, since this was said behind the hello, or behind what comes before it."""
        worker = self.begun()
        for kind in before:
            getattr(worker, kind)()
        say(worker)
        self.says("protocol_violation")
        self.gone(worker)
        worker.close()

    def test_welcomes_and_slabs_that_are_none_are_refused(self) -> None:
        for bad, before in ((BAD_WELCOMES, ()), (BAD_SLABS, ("welcome",))):
            for name, say in bad.items():
                with self.subTest(name):
                    self.broken(say, *before)

    # --- answers

    def test_an_answer_that_lies_breaks_the_channel_off(self) -> None:
        for name, say in BAD_ANSWERS.items():
            with self.subTest(name):
                worker, _ = self.asking(features=BOTH)
                self.do("ask a after x")  # whatever comes first, this one is not answered
                say(worker)
                self.do("get after", "protocol_violation")
                self.do("ask a again x")  # at the latest now
                self.gone(worker)
                self.do("reset")
        with self.subTest("a slab withdrawn, which was not agreed"):
            worker, _ = self.asking()
            worker.name_slab("slab_withdraw", 1)
            self.do("get r", "protocol_violation")

    def test_answers_may_come_in_any_order_and_inputs_in_flight_keep_their_bytes(self) -> None:
        worker = self.opened()
        sent = {}
        for name in ("r", "s"):
            self.do(f"put a {name}x 1 2 {len(sent)}")
            sent[name] = self.asked(worker, name, f"{name}x")
            self.do(f"drop {name}x")
        places = [tensor["lease"]["offset_bytes"] for _, tensor in sent.values()]
        self.assertNotEqual(*places)
        for at, name in enumerate(("s", "r")):
            number, tensor = sent[name]
            worker.answer(number, worker.floats(tensor), offset=64 * at, lease_id=at + 1)
        self.do("get r", "ok 1 2 0")
        self.do("get s", "ok 1 2 1")
        self.do("put a x 3")
        _, tensor = self.asked(worker, "t")
        self.assertIn(tensor["lease"]["offset_bytes"], places)
        self.assertNotIn(tensor["lease"]["lease_id"], [one["lease"]["lease_id"] for _, one in sent.values()])

    def test_an_error_of_one_request_is_its_own_and_one_of_the_channel_ends_it_only_if_nothing_follows(self) -> None:
        worker, number = self.asking()
        worker.error(number, 10, "x has rank 1", "send rank 2")
        self.do("get r", "shape_mismatch x has rank 1; send rank 2")
        self.serves(worker)
        number, _ = self.asked(worker, "r")
        worker.error(0, BROKEN, "a stale release")
        worker.answer(number, [1.0])
        self.do("get r", "ok 1")
        self.asked(worker, "s")
        worker.error(0, BROKEN, "17 stale releases")
        worker.close()
        self.do("get s", "protocol_violation 17 stale releases")

    def test_what_was_delivered_before_a_death_is_handed_out_and_all_else_is_lost(self) -> None:
        for found_by_sending in (False, True):
            with self.subTest(found_by_sending):
                worker = self.opened()
                self.do("put a x 1")
                numbers = {name: self.asked(worker, name)[0] for name in ("r", "s", "t")}
                worker.answer(numbers["r"], [42.0])
                worker.close()
                if found_by_sending:
                    self.client.begin("cancel s")
                    self.client.end()
                    self.do("ask a u x")
                    self.do("get u", "worker_lost")
                else:
                    self.do("get s", "worker_lost")
                self.do("get t", "worker_lost")
                self.do("get r", "ok 42")
                self.do("ask a u x")
                self.do("get u", "worker_lost")
                self.do("close a")
                self.do("read r", "ok 42")
                self.do("reset")

    def test_closing_refuses_what_is_new_and_answers_what_is_under_way(self) -> None:
        worker, number = self.asking()
        worker.send("closing", layout.CLOSING.pack(code=14, deadline_ms=1000))
        worker.answer(number, [1.0])
        self.do("get r", "ok 1")
        self.do("ask a s x")
        self.do("get s", "worker_draining")
        self.do("close a")
        self.gone(worker)

    def test_more_requests_than_the_worker_takes_are_refused_here(self) -> None:
        if self.waits_its_turn:
            return
        worker = self.opened(in_flight=2)
        self.do("put a x 1")
        numbers = [self.asked(worker, name)[0] for name in ("r", "s")]
        self.do("ask a t x")
        self.do("get t", "queue_full")
        worker.answer(numbers[0], [1.0])
        self.do("get r", "ok 1")
        self.serves(worker)

    def test_a_cancelled_request_ends_and_its_neighbour_lives(self) -> None:
        worker, number = self.asking()
        other, _ = self.asked(worker, "s")
        self.do("cancel r")
        self.assertEqual(worker.expect("cancel")[0]["request_id"], number)
        worker.error(number, 9, "cancelled")
        worker.answer(other, [2.0])
        self.do("get r", "cancelled")
        self.do("get s", "ok 2")
        self.do("cancel s")  # too late
        self.serves(worker)

    def test_a_worker_that_misses_the_deadline_is_not_waited_for_and_may_answer_later(self) -> None:
        worker = self.opened()
        self.do("put a x 1")
        late, tensor = self.asked(worker, "r", how="1")
        self.do("drop x")
        self.do("get r", "deadline_exceeded")
        self.assertEqual(worker.expect("cancel")[0]["request_id"], late)
        self.do("put a y 2")
        number, other = self.asked(worker, "s", "y")
        self.assertNotEqual(other["lease"]["offset_bytes"], tensor["lease"]["offset_bytes"])
        worker.answer(late, [1.0])
        worker.answer(number, [2.0], offset=64, lease_id=2)
        self.do("get s", "ok 2")

    # --- memory

    def test_an_output_goes_back_with_the_next_request_once_it_is_dropped(self) -> None:
        worker, number = self.asking()
        worker.answer(number, [1.0], offset=128, lease_id=9)
        self.do("get r", "ok 1")
        self.serves(worker)
        self.assertEqual(worker.released, [])
        self.do("drop r")
        self.do("drop last")
        self.serves(worker)
        self.assertEqual(sorted(worker.released), [(128, 9), (8192, 99)])

    def test_full_inputs_grow_by_a_slab_and_a_refused_one_is_the_error_of_its_asker(self) -> None:
        worker = self.opened()
        self.client.begin("new a big 40000")
        head, body = worker.expect("slab_request")
        asked = layout.SLAB_REQUEST.unpack(body)
        self.assertEqual((asked["direction"], asked["kind"]), (1, KIND["host_memfd"]))
        self.assertGreaterEqual(asked["size_bytes"], 160_000)
        worker.offer(3, "input", asked["size_bytes"], request_id=head["request_id"])
        self.says("ok")
        number, tensor = self.asked(worker, "r", "big")
        self.assertEqual(tensor["lease"]["slab_id"], 3)
        worker.answer(number, [1.0])
        self.do("get r", "ok 1")
        self.client.begin("new a more 80000")
        worker.error(worker.expect("slab_request")[0]["request_id"], 19, "creating a slab", "free memory")
        self.says("resources_exhausted creating a slab")
        self.do("new a huge 1000000", "resources_exhausted 1048576 bytes")  # nobody is asked
        self.serves(worker)
        self.client.begin("new a more 80000")
        # Less than was asked for.
        worker.offer(4, "input", 4096, request_id=worker.expect("slab_request")[0]["request_id"])
        self.says("protocol_violation")
        self.gone(worker)

    # --- parts

    def streams(self, worker: FakeWorker, number: int, parts: int, last: bool = True) -> None:
        for part in range(parts):
            more = FLAG["more"] if part < parts - 1 or not last else 0
            worker.answer(number, [float(part)], offset=64 * part, lease_id=part + 1, flags=more)

    def test_parts_come_in_order_and_the_last_ends_the_request(self) -> None:
        worker = self.opened(features=FEATURE["streaming"])
        self.do("put a x 1")
        numbers = [self.asked(worker, name, how="parts")[0] for name in ("r", "s")]
        for number in numbers:
            self.streams(worker, number, 3)
        for name in ("s", "r"):
            for expected in ("more 0", "more 1", "ok 2"):
                self.do(f"get {name}", expected)
        number, _ = self.asked(worker, "t")  # who waits for the answer gets the last part
        self.streams(worker, number, 3)
        self.do("get t", "ok 2")
        worker.released.clear()
        self.serves(worker)
        # Of the parts that nobody took.
        self.assertEqual(sorted(worker.released), [(0, 1), (64, 2)])
        number, _ = self.asked(worker, "u", how="parts")
        self.streams(worker, number, 2, last=False)
        worker.close()
        for expected in ("more 0", "more 1", "worker_lost"):
            self.do("get u", expected)

    def test_leaving_a_stream_cancels_it_and_gives_back_what_still_comes(self) -> None:
        worker, number = self.asking(features=FEATURE["streaming"], how="parts")
        worker.answer(number, [0.0], flags=FLAG["more"])
        self.do("get r", "more 0")
        self.do("leave r")
        self.assertEqual(worker.expect("cancel")[0]["request_id"], number)
        worker.answer(number, [1.0], offset=64, lease_id=2, flags=FLAG["more"])
        worker.error(number, 9)
        self.serves(worker)
        self.serves(worker)
        self.assertIn((64, 2), worker.released)

    # --- outputs of one worker as inputs of another

    def given(self, **lease: int) -> tuple[FakeWorker, FakeWorker]:
        """Two that lend and return, and the answer `r` of the first, 4 5 6."""
        first, second = self.opened(features=BOTH), self.opened("b", features=BOTH)
        self.do("put a x 1")
        number, _ = self.asked(first, "r")
        first.answer(number, [4.0, 5.0, 6.0], **{"offset": 192, "lease_id": 77, **lease})
        self.do("get r", "ok 4 5 6")
        return first, second

    def forwarded(self, second: FakeWorker, request: str, lends: bool = True,
                  channel: str = "b") -> tuple[int, int, dict[str, Any]]:  # fmt: skip
        """Sends `r` to it: the loan's number, the request's, and its tensor."""
        self.client.begin(f"ask {channel} {request} r")
        loan, memory = second.borrow() if lends else (0, None)
        head, body = second.expect("infer")
        self.says("ok")
        (tensor,) = second.tensors(body)
        return loan, head["request_id"], tensor

    def test_an_output_is_read_where_it_lies_and_lent_once(self) -> None:
        first, second = self.given()
        for loans, name in enumerate("st"):
            loan, number, tensor = self.forwarded(second, name, lends=loans == 0)
            lease = tensor["lease"]
            self.assertGreaterEqual(lease["slab_id"], LIMITS["lent_slab_id_min"])
            self.assertEqual([lease[key] for key in ("offset_bytes", "size_bytes", "lease_id")], [192, 12, 77])
            # What the one writes, the other sees.
            first.slabs[2][192:196] = struct.pack("<f", 8.0 + loans)
            second.answer(number, second.floats(tensor), offset=64 * loans, lease_id=loans + 1)
            self.do(f"get {name}", f"ok {8 + loans} 5 6")
        loan, number, tensor = self.forwarded(first, "u", channel="a")  # also by its own worker
        self.assertEqual(tensor["lease"]["slab_id"], loan)
        first.answer(number, first.floats(tensor), offset=64, lease_id=78)
        self.do("get u", "ok 9 5 6")

    def test_its_lease_goes_back_when_the_second_has_answered_or_ended_and_not_earlier(self) -> None:
        for ends in (False, True):
            with self.subTest(ends=ends):
                first, second = self.given()
                _, number, _ = self.forwarded(second, "s")
                if ends:
                    second.close()
                    self.do("get s", "worker_lost")
                    self.do("read r", "ok 4 5 6")
                    self.do("drop r")
                else:
                    self.do("drop r")
                    self.serves(first)
                    self.assertNotIn((192, 77), first.released)
                    second.answer(number, [1.0])
                    self.do("get s", "ok 1")
                self.do("drop s")  # its error may hold what it was about
                self.serves(first)
                self.assertIn((192, 77), first.released)
                self.do("reset")

    def test_a_withdrawn_slab_goes_back_when_neither_the_client_nor_the_borrower_needs_it(self) -> None:
        first, second = self.given()
        loan, number, _ = self.forwarded(second, "s")
        first.name_slab("slab_withdraw", 2)
        first.offer(4, "output")
        self.do("put a x 1")
        heard, _ = self.asked(first, "heard")
        first.answer(heard, [1.0], slab=4)
        self.do("get heard", "ok 1")  # so what came before it is known
        second.answer(number, [1.0])  # only now does nobody use the loan
        self.do("get s", "ok 1")
        self.returns(second, "b", loan)
        self.do("read r", "ok 4 5 6")
        self.do("drop r")
        self.returns(first, "a", 2)

    def returns(self, worker: FakeWorker, channel: str, slab: int) -> None:
        """Before its next request at the latest."""
        self.do(f"put {channel} own 1")
        self.do(f"ask {channel} next-{channel} own")
        self.assertEqual(worker.returned(), slab)
        worker.expect("infer")

    def test_the_end_of_the_first_ends_the_loan_and_leaves_the_bytes_to_who_reads_them(self) -> None:
        for ends in ("dies", "is closed"):
            with self.subTest(ends):
                first, second = self.given()
                loan, number, tensor = self.forwarded(second, "s")
                if ends == "dies":
                    self.asked(first, "t")
                    first.close()
                    self.do("get t", "worker_lost")
                else:
                    self.do("close a")
                second.answer(number, second.floats(tensor))
                self.do("get s", "ok 4 5 6")
                self.returns(second, "b", loan)
                self.do("read r", "ok 4 5 6")
                if ends == "dies":  # it may be sent again
                    again, number, tensor = self.forwarded(second, "u", lends=self.lends_of_the_dead)
                    self.assertNotEqual(again, loan)
                    second.answer(number, second.floats(tensor), offset=64, lease_id=2)
                    self.do("get u", "ok 4 5 6")
                self.do("reset")

    def test_a_worker_that_takes_no_loan_gets_a_copy(self) -> None:
        for why in ("it did not agree", "it has no room"):
            with self.subTest(why):
                self.given()
                taker = self.opened("b", features=0 if why == "it did not agree" else BOTH)
                self.client.begin("ask b s r")
                if why == "it has no room":
                    taker.error(taker.expect("slab_lend")[0]["request_id"], 19, "no more slabs")
                head, body = taker.expect("infer")
                self.says("ok")
                (tensor,) = taker.tensors(body)
                self.assertEqual(tensor["lease"]["slab_id"], 1)
                taker.answer(head["request_id"], taker.floats(tensor))
                self.do("get s", "ok 4 5 6")
                self.do("reset")


class CppBlocking(Exchanges):
    make = staticmethod(lambda: Cpp("blocking"))


class CppAsync(Exchanges):
    make = staticmethod(lambda: Cpp("async"))


class Python(Exchanges):
    lends_of_the_dead = False

    def setUp(self) -> None:
        super().setUp()
        for module in (blocking, aio_channel):
            patched = mock.patch.object(module, "GRACE_SECONDS", 0.0)
            patched.start()
            self.addCleanup(patched.stop)


class PythonBlocking(Python):
    make = Blocking


class PythonAsyncio(Python):
    waits_its_turn = True
    make = Asyncio


del Exchanges, Python  # run for the four alone

if __name__ == "__main__":
    unittest.main()
