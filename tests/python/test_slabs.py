"""Memory of the Python client: what is lent to workers, returned to them, allocated here, and left
alone by a forked child."""

from __future__ import annotations

import gc
import mmap
import os
import select
import resource
import threading
import unittest
from unittest import mock

import bulkhead
from bulkhead import channel as blocking
from bulkhead import layout, memory, slabs
from bulkhead.layout import DIRECTION, FEATURE, KIND, LIMITS
from bulkhead.memory import ALIGNMENT, Allocator, Mapping
from bulkhead.shared_tensors import Arena
from opened import Opened

BOTH = FEATURE["lending"] | FEATURE["returning"]


class Lending(Opened):
    def setUp(self) -> None:
        super().setUp()
        self.first = self.open(features=BOTH)
        self.other = self.another()
        self.second = self.open_to(self.other, features=BOTH)

    def result(self, values: list[float], **lease: int) -> bulkhead.Output:
        """Of the first worker."""

        self.serve(lambda: self.worker.answer_next(values, **lease))
        return self.first.infer(x=[0.0])["y"]

    def borrow_once(self, count: int = 1) -> None:
        self.number, _ = self.other.borrow()
        for _ in range(count):
            self.other.answer_next()

    def test_a_loan_is_returned_once_the_first_worker_wants_the_slab_back(self) -> None:
        output = self.result([1.0])
        self.serve(lambda: self.borrow_once()).join(0)
        self.second.infer(x=output)
        self.worker.name_slab("slab_withdraw", 2)
        self.first.settle()
        self.second.settle()
        self.assertEqual(self.other.returned(), self.number)

        def serve() -> None:  # it is no longer lent: copied
            head, body = self.other.expect("infer")
            (tensor,) = self.other.tensors(body)
            self.assertLess(tensor["lease"]["slab_id"], LIMITS["lent_slab_id_min"])
            self.other.answer(head["request_id"], self.other.floats(tensor))

        self.serve(serve)
        self.assertEqual(self.second.infer(x=output)["y"].tolist(), [1.0])
        del output
        gc.collect()
        self.first.settle()
        self.assertEqual(self.worker.returned(), 2)

    def test_a_loan_stays_while_a_request_names_it(self) -> None:
        output = self.result([1.0])

        def serve() -> None:
            self.number, _ = self.other.borrow()
            self.head, _ = self.other.expect("infer")

        serving = self.serve(serve)
        request = self.second.submit(x=output)
        serving.join()
        self.worker.close()
        self.first.settle()
        self.second.settle()
        self.assertFalse(self.first.is_open)
        self.assertEqual(select.select([self.other.socket], [], [], 0)[0], [], "something was said to the second worker")
        self.other.answer(self.head["request_id"], [3.0])
        self.assertEqual(self.second.wait(request)["y"].tolist(), [3.0])
        self.second.settle()
        self.assertEqual(self.other.returned(), self.number)

    def test_a_slab_that_outlives_its_loans_does_not_collect_those_who_watched_it(self) -> None:
        arena = Arena()
        self.addCleanup(arena.close)
        own = arena.allocate((1,), "float32")
        region = own.lease.region
        lent = [self.first.core.slabs.lend(own), self.second.core.slabs.lend(own)]
        self.assertEqual((len(region._watchers), len(region._gone)), (2, 2))
        self.assertTrue(self.first.core.slabs.on_refusal(next(iter(self.first.core.slabs._asked)), bulkhead.Error("internal", "no")))
        self.second.close()
        self.assertEqual((len(region._watchers), len(region._gone)), (0, 0))
        self.assertIsNotNone(lent)


class OwnMemory(Opened):
    def test_what_was_allocated_for_no_model_is_lent_to_each(self) -> None:
        workers = [self.worker, self.another()]
        channels = [self.open_to(worker, features=BOTH) for worker in workers]
        arena = Arena()
        with arena.allocate((2,), "float32") as room:
            room.data.cast("f")[1] = 4.0
            for worker, channel in zip(workers, channels):

                def serve() -> None:
                    worker.borrow()
                    worker.answer_next()

                serving = self.serve(serve)
                self.assertEqual(channel.infer(x=room)["y"].tolist(), [0.0, 4.0])
                serving.join()

    def test_room_that_was_released_is_used_again_and_growth_lets_go_of_what_is_empty(self) -> None:
        arena = Arena()
        addresses = set()
        for _ in range(10):
            with arena.allocate((1000,), "float32") as room:
                addresses.add(room.lease.offset)
        self.assertEqual(len(addresses), 1)
        big = arena.allocate((1 << 20,), "float32")
        self.assertEqual([mapping.size_bytes >= big.nbytes for mapping, _ in arena._slabs], [True])

    def test_what_exceeds_its_bound_is_refused_and_what_was_released_counts_no_more(self) -> None:
        arena = Arena(bytes_max=5 << 19)
        self.addCleanup(arena.close)
        self.assertIn("memory_bytes_max", self.refused("resources_exhausted", lambda: arena.allocate((1 << 50,), "uint8")).remedy)
        first = arena.allocate((900 << 10,), "uint8")
        second = arena.allocate((1200 << 10,), "uint8")  # growth by doubling is cut to what is left
        self.assertLessEqual(sum(mapping.size_bytes for mapping, _ in arena._slabs), arena.bytes_max)
        self.refused("resources_exhausted", lambda: arena.allocate((1200 << 10,), "uint8"))
        first.release()
        second.release()
        arena.allocate((2400 << 10,), "uint8")

    def test_memory_that_the_machine_does_not_have_is_not_asked_for(self) -> None:
        arena = Arena(bytes_max=1 << 50)
        with mock.patch.object(memory.os, "memfd_create", side_effect=AssertionError("it was asked for")):
            with mock.patch.object(memory, "available_bytes", lambda: 8192):
                said = self.refused("resources_exhausted", lambda: arena.allocate((1 << 40,), "uint8"))
                self.assertIn("8192", said.attempt)
            with mock.patch.object(resource, "getrlimit", lambda _: (4096, 4096)):
                self.assertIn("ulimit -f", self.refused("resources_exhausted", lambda: arena.allocate((8192,), "uint8")).attempt)
        # As the kernel writes it, or not at all.
        with mock.patch("builtins.open", mock.mock_open(read_data="MemTotal:       9 kB\nMemAvailable:    3 kB\n")):
            self.assertEqual(memory.available_bytes(), 3072)
        with mock.patch("builtins.open", side_effect=FileNotFoundError):
            self.assertIsNone(memory.available_bytes())

    def test_threads_share_it(self) -> None:
        arena = Arena()
        failures: list[BaseException] = []

        def work(value: int) -> None:
            try:
                for _ in range(300):
                    with arena.allocate((64,), "uint8") as room:
                        room.data[:] = bytes([value]) * 64
                        assert bytes(room.data) == bytes([value]) * 64, "somebody else wrote here"
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])


class Returning(Opened):
    def test_an_input_slab_that_was_empty_for_long_is_returned_and_the_first_is_kept(self) -> None:
        channel = self.open(features=BOTH)

        def grow() -> None:
            head, _ = self.worker.expect("slab_request")
            self.worker.offer(3, "input", 1 << 17, request_id=head["request_id"])

        self.serve(grow)
        room = channel.allocate((100_000,), "uint8")
        channel.core.slabs.settle(now=1000.0)
        del room
        gc.collect()
        channel.core.slabs.settle(now=1000.0)
        channel.core.slabs.settle(now=1000.0 + slabs.IDLE_SECONDS - 1)
        self.assertEqual(len(channel.core.slabs._inputs), 2)
        channel.core.slabs.settle(now=1000.0 + slabs.IDLE_SECONDS)
        channel.core.slabs.settle(now=9000.0)
        channel.settle()
        self.assertEqual(self.worker.returned(), 3)
        self.assertEqual(len(channel.core.slabs._inputs), 1)

        self.worker.name_slab("slab_withdraw", 3)  # as from a worker that had not read that yet
        self.serve(lambda: self.worker.answer_next([1.0])).join(0)
        self.assertEqual(channel.infer(x=[1.0])["y"].tolist(), [1.0])
        self.worker.name_slab("slab_withdraw", 3)  # but no slab is withdrawn twice
        self.refused("protocol_violation", lambda: channel.infer(x=[1.0]))

    def test_a_slab_that_was_given_back_leaves_its_bytes_to_the_next(self) -> None:
        channel = self.open(features=BOTH, bytes_max=3 << 16)
        self.worker.name_slab("slab_withdraw", 2)
        channel.settle()
        self.assertEqual(self.worker.returned(), 2)
        self.worker.offer(3, "output", 2 << 16)
        channel.settle()
        self.assertTrue(channel.is_open)

    def test_a_slab_that_comes_late_is_heard_of_before_the_next_is_asked_for(self) -> None:
        channel = self.open(features=BOTH)
        channel.core.slabs._gpu_agreed = KIND["cuda_ipc"]  # as with a GPU
        with mock.patch.object(blocking, "SLAB_SECONDS", 0.01):
            self.refused("deadline_exceeded", lambda: channel.allocate((100_000,), "uint8"))
        late, _ = self.worker.expect("slab_request")

        def serve() -> None:
            self.worker.error(late["request_id"], 19, "the late one")
            head, body = self.worker.expect("slab_request")
            self.assertEqual(layout.SLAB_REQUEST.unpack(body)["direction"], DIRECTION["output"])
            # Or it would be told instead of what comes now.
            self.assertIsNone(channel.core.slabs._growth_refused)
            self.worker.error(head["request_id"], 12, "the one that was waited for")

        self.serve(serve)
        self.refused("out_of_memory", lambda: channel.results_on_gpu(4096))


class Books(unittest.TestCase):
    def test_random_leases_never_overlap_and_all_come_back(self) -> None:
        import random

        chance = random.Random(7)
        allocator = Allocator(1 << 16)
        held: dict[int, int] = {}
        lease_ids: set[int] = set()
        for _ in range(10_000):
            if held and chance.random() < 0.5:
                offset = chance.choice(list(held))
                allocator.release(offset, held.pop(offset))
            elif (found := allocator.allocate(size := chance.randrange(0, 5000))) is not None:
                offset, lease_id = found
                end = offset + max(size, 1)
                self.assertEqual(offset % ALIGNMENT, 0)
                self.assertLessEqual(end, 1 << 16)
                self.assertFalse(any(offset < at + max(length, 1) and at < end for at, length in held.items()))
                self.assertNotIn(lease_id, lease_ids)
                lease_ids.add(lease_id)
                held[offset] = size
        for offset, size in held.items():
            allocator.release(offset, size)
        self.assertTrue(allocator.is_empty)

    def test_what_a_finalizer_gives_back_in_the_midst_of_an_allocation_harms_nobody(self) -> None:
        allocator = Allocator(1 << 16)
        held = [allocator.allocate(64) for _ in range(10)]
        for offset, _ in held[::2]:
            allocator.release(offset, 64)
        left = [offset for offset, _ in held[1::2]]

        class Interrupted(dict):
            """While it is looked through, the collector runs."""

            def items(self):
                for item in super().items():
                    if left:
                        allocator.release(left.pop(), 64)
                    yield item

        allocator._free = Interrupted(allocator._free)
        offset, _ = allocator.allocate(64)
        self.assertEqual(left, [])
        allocator.release(offset, 64)
        self.assertTrue(allocator.is_empty)

    def test_a_forked_child_leaves_alone_what_lies_where_a_slab_was(self) -> None:
        mapping = Mapping.make(4096, "test", only_we_write=True)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                # MADV_DONTFORK has left a hole there; the child's own memory comes to lie in it.
                import ctypes

                libc = ctypes.CDLL(None)
                libc.mmap.restype = ctypes.c_void_p
                libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
                at = libc.mmap(mapping.address, 4096, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000, -1, 0)
                del mapping
                gc.collect()
                ctypes.memset(at, 7, 4096)  # would be the end of it, were it unmapped
                status = 0
            finally:
                os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)


if __name__ == "__main__":
    unittest.main()
