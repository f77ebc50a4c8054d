"""The control socket from Python, and what a client does when supervisors and workers go away,
against a fake daemon."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import unittest
from pathlib import Path
from typing import Any

import bulkhead
from bulkhead.layout import FEATURE
from fake_daemon import Connection, FakeDaemon, WithFakeDaemon
from fake_worker import FakeWorker

SOURCE = Path(__file__).resolve().parents[2]


def dies_once(then: Any) -> Any:
    """A supervisor that dies of the first request, and its successor."""
    died = threading.Event()

    def handle(connection: Connection, request: dict[str, Any]) -> None:
        if not died.is_set():
            died.set()
            return connection.die()
        then(connection, request)

    return handle


class Calls(WithFakeDaemon):
    def test_a_load_that_takes_long_delays_nobody(self) -> None:
        asked, done = threading.Event(), threading.Event()
        self.addCleanup(done.set)

        def load(connection: Connection, request: dict[str, Any]) -> None:
            asked.set()
            done.wait(60)
            connection.answer(request, {"models": [{"model": "slow"}]})

        daemon = self.daemon(model_load=load, fleet_status=lambda c, r: c.answer(r, {"models": []}))
        client = self.connect(daemon)
        loaded: list[Any] = []
        thread = threading.Thread(target=lambda: loaded.append(client.load("slow")))
        thread.start()
        asked.wait(60)
        self.assertEqual(client.ps(), [])
        done.set()
        thread.join()
        self.assertEqual(loaded, [[{"model": "slow"}]])

    def test_a_load_is_asked_again_of_the_next_supervisor_and_says_so(self) -> None:
        daemon = self.daemon(model_load=dies_once(lambda c, r: c.answer(r, {"models": []})))
        self.connect(daemon).load("a", deadline=100.0)
        first, second = (request["params"] for request in daemon.asked)
        self.assertNotIn("again", first)
        self.assertEqual(second["again"], True)
        self.assertLessEqual(second["deadline_ms"], first["deadline_ms"])

    def test_what_repeating_does_not_change_is_asked_again(self) -> None:
        for method in ("fleet.plan", "fleet.memory", "model.pin"):
            with self.subTest(method):
                daemon = self.daemon(**{method.replace(".", "_"): dies_once(lambda c, r: c.answer(r, {}))})
                self.assertEqual(self.connect(daemon).call(method), {})
                self.assertEqual([request["method"] for request in daemon.asked], [method, method])

    def test_the_page_says_what_is_asked_again(self) -> None:
        page = (SOURCE / "docs/control.md").read_text("utf-8")
        words = {"as it was": {"freely", "to_end"}, 'with `"again": true`': {"marked"}, "never": {"never"}}
        said = [(method, words[how]) for how, methods in re.findall(r"^\| ([^|]+) \| (`\w+\.[^|]+) \|", page, re.MULTILINE)
                if how in words for method in re.findall(r"`(\w+\.\w+)`", methods)]  # fmt: skip
        methods = json.loads((SOURCE / "ipc/links/control.json").read_text("utf-8"))["methods"]
        self.assertEqual(sorted(method for method, _ in said), sorted(methods))
        for method, repeats in said:
            self.assertIn(methods[method], repeats, method)

    def test_what_may_not_be_asked_twice_is_an_error_unless_it_never_left(self) -> None:
        served: list[Connection] = []

        def info(connection: Connection, request: dict[str, Any]) -> None:
            served.append(connection)
            connection.answer(request, {})

        daemon = self.daemon(daemon_upgrade=dies_once(lambda c, r: c.answer(r, {})), daemon_info=info)
        client = self.connect(daemon)
        self.refused("not_running", lambda: client.call("daemon.upgrade"))
        self.assertEqual(len(daemon.asked), 1)
        client.info()
        served[0].die()
        self.assertEqual(client.call("daemon.upgrade"), {})

    def test_a_daemon_that_has_gone(self) -> None:
        daemon = FakeDaemon(fleet_status=lambda c, r: c.answer(r, {"models": []}))
        client = self.connect(daemon)
        daemon.close()
        self.refused("not_running", client.ps)

    def test_a_stop_that_was_under_way_is_done(self) -> None:
        daemon = self.daemon()

        def stop(connection: Connection, request: dict[str, Any]) -> None:
            os.unlink(daemon.path)
            connection.die()

        daemon.handlers["daemon.stop"] = stop
        self.assertEqual(self.connect(daemon).stop(), [])

    def test_the_daemons_error_is_ours(self) -> None:
        error = {"code": -32000, "message": "x", "data": {"code": "model_unknown", "attempt": "a", "remedy": "b"}}
        daemon = self.daemon(model_why=lambda c, r: c.send({"jsonrpc": "2.0", "id": r["id"], "error": error}))
        told = self.refused("model_unknown", lambda: self.connect(daemon).why("nobody"))
        self.assertEqual((told.attempt, told.remedy), ("a", "b"))

    def test_answers_that_are_none(self) -> None:
        for text in (b"[]\n", b"nonsense\n", b"x" * (2 << 20)):
            with self.subTest(text[:8]):

                def answer(connection: Connection, request: dict[str, Any]) -> None:
                    try:
                        connection.socket.sendall(text)
                    except OSError:
                        pass  # the client left in the midst of it

                client = self.connect(self.daemon(fleet_status=answer))
                self.refused("protocol_violation", client.ps)

    def test_a_deadline_and_the_late_answer_that_is_not_the_next_ones(self) -> None:
        asked = threading.Event()
        late: list[Any] = []

        def slowly(connection: Connection, request: dict[str, Any]) -> None:
            late.append((connection, request))
            asked.set()

        daemon = self.daemon(fleet_status=slowly, daemon_info=lambda c, r: c.answer(r, {"version": "1"}))
        client = self.connect(daemon)
        self.refused("deadline_exceeded", lambda: client.call("fleet.status", deadline=0.01))
        self.assertEqual(client.info(), {"version": "1"})

    def test_a_forked_child_has_a_connection_of_its_own(self) -> None:
        daemon = self.daemon(daemon_info=lambda c, r: c.answer(r, {"version": "1"}))
        client = self.connect(daemon)
        self.assertEqual(client.info(), {"version": "1"})
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if client.info() == {"version": "1"} else 2
            finally:
                os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(client.info(), {"version": "1"})
        self.assertEqual(len(daemon.connections), 2)


class Subscriptions(WithFakeDaemon):
    def test_events_go_on_with_the_next_supervisor_and_say_that_some_may_be_missing(self) -> None:
        def subscribe(connection: Connection, request: dict[str, Any]) -> None:
            connection.answer(request, {"subscribed": True})
            connection.notify("event", {"event": "state", "to": "ready"})
            connection.die()

        async def on_a_loop(client: bulkhead.aio.Client) -> list[str]:
            async with client, await client.events() as events:
                return [(await anext(events))["event"] for _ in range(3)]

        with self.connect(self.daemon(events_subscribe=subscribe)).events() as events:
            seen = [next(events)["event"] for _ in range(3)]
        self.assertEqual(seen, ["state", "resubscribed", "state"])
        self.assertEqual(asyncio.run(on_a_loop(bulkhead.aio.connect(self.daemon(events_subscribe=subscribe).path))), seen)

    def test_lines_of_a_log_are_not_told_twice(self) -> None:
        line = [{"time": at, "replica": 0, "generation": 1, "stream": "output", "text": str(at)} for at in range(4)]

        def follows() -> FakeDaemon:
            def tail(connection: Connection, request: dict[str, Any]) -> None:
                connection.answer(request, {"lines": line[:2] if len(made.asked) == 1 else line[:3]})
                if len(made.asked) == 1:
                    return connection.die()
                connection.notify("log", {"model": "m", **line[3]})

            made = self.daemon(logs_tail=tail)
            return made

        async def follow(client: bulkhead.aio.Client) -> list[str]:
            async with client, await client.follow_logs("m") as lines:
                return [(await anext(lines))["text"] for _ in range(4)]

        daemons = follows(), follows()
        following = iter(self.connect(daemons[0]).logs("m", follow=True))
        self.assertEqual([next(following)["text"] for _ in range(4)], ["0", "1", "2", "3"])
        following.close()
        self.assertEqual(asyncio.run(follow(bulkhead.aio.connect(daemons[1].path))), ["0", "1", "2", "3"])
        for daemon in daemons:
            self.assertEqual([request["params"].get("follow") for request in daemon.asked], [True, True])

    def test_closing_ends_a_reader_on_another_thread(self) -> None:
        client = self.connect(self.daemon(events_subscribe=lambda c, r: c.answer(r, {"subscribed": True})))
        events = client.events()
        reader = threading.Thread(target=lambda: list(events))
        reader.start()
        events.close()
        reader.join()

    def test_who_does_not_read_gathers_nothing_here(self) -> None:
        def flood(connection: Connection, request: dict[str, Any]) -> None:
            connection.answer(request, {"subscribed": True})
            connection.socket.setblocking(False)
            sent = 0
            try:
                while sent < 1 << 26:
                    sent += connection.socket.send(b'{"jsonrpc":"2.0","method":"event","params":{"event":"x"}}\n')
            except BlockingIOError:
                full.append(sent)
                blocked.set()

        full: list[int] = []
        blocked = threading.Event()
        events = self.connect(self.daemon(events_subscribe=flood)).events()
        self.assertTrue(blocked.wait(60))
        self.assertLess(full[0], 1 << 22)
        self.assertEqual(len(events._waiting), 0)
        events.close()


def open_and(worker: FakeWorker, then: Any, **welcome: int) -> threading.Thread:
    def run() -> None:
        worker.open(**welcome)
        then(worker)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def die_of_one(worker: FakeWorker) -> None:
    worker.expect("infer")
    worker.close()


class Retries(WithFakeDaemon):
    def serving(self, *lives: Any, stateful: bool = False) -> tuple[FakeDaemon, bulkhead.Client]:
        """A daemon whose worker lives one life after the other."""
        left = list(lives)

        def introduce(connection: Connection, request: dict[str, Any]) -> None:
            worker = FakeWorker()
            thread = open_and(worker, left.pop(0))
            self.addCleanup(thread.join)
            daemon.introduce(worker, connection, request, stateful=stateful)

        daemon = self.daemon(channel_open=introduce)
        return daemon, self.connect(daemon)

    def test_a_request_is_sent_once_more_if_it_may_be_and_its_model_keeps_no_state(self) -> None:
        for safe, stateful, lives, asked in ((True, False, [die_of_one], 2), (False, False, [die_of_one], 1), (True, False, [die_of_one] * 2, 2),
                                             (True, True, [die_of_one], 1)):  # fmt: skip
            with self.subTest(safe=safe, stateful=stateful, lives=len(lives)):
                daemon, client = self.serving(*lives, FakeWorker.answer_next, stateful=stateful)
                if asked > len(lives):
                    self.assertEqual(client.infer("fake", x=[5.0], retry_safe=safe)["y"].tolist(), [5.0])
                else:
                    self.refused("worker_lost", lambda: client.infer("fake", x=[5.0], retry_safe=safe))
                self.assertEqual(len(daemon.asked), asked)
                if asked <= len(lives) and not stateful:  # the next request finds the next worker
                    self.assertEqual(client.infer("fake", x=[6.0])["y"].tolist(), [6.0])

    def test_on_a_loop_it_is_sent_once_more_too(self) -> None:
        daemon, _ = self.serving(die_of_one, FakeWorker.answer_next)

        async def run() -> Any:
            async with bulkhead.aio.connect(daemon.path) as client:
                return (await client.infer("fake", x=[2.0], retry_safe=True))["y"].tolist()

        self.assertEqual(asyncio.run(run()), [2.0])

    def test_state_that_was_lost_between_two_requests_is_told(self) -> None:
        def answer_and_die(worker: FakeWorker) -> None:
            worker.answer_next()
            worker.close()
            dead.set()

        dead = threading.Event()
        _, client = self.serving(answer_and_die, FakeWorker.answer_next, stateful=True)
        client.infer("fake", x=[1.0])
        dead.wait(60)
        self.refused("worker_lost", lambda: client.infer("fake", x=[2.0]))
        self.assertEqual(client.infer("fake", x=[3.0])["y"].tolist(), [3.0])

    def test_what_was_filled_in_place_is_sent_again_too(self) -> None:
        _, client = self.serving(die_of_one, FakeWorker.answer_next)
        with client.allocate((1,), model="fake") as room:
            room.data.cast("f")[0] = 8.0
            self.assertEqual(client.infer("fake", x=room, retry_safe=True)["y"].tolist(), [8.0])

    def test_a_thread_that_ends_leaves_no_channel_behind(self) -> None:
        closed = threading.Event()

        def until_it_ends(worker: FakeWorker) -> None:
            worker.answer_next()
            while data := worker.socket.recv(65536):
                del data
            closed.set()

        _, client = self.serving(until_it_ends)
        thread = threading.Thread(target=lambda: client.infer("fake", x=[1.0]))
        thread.start()
        thread.join()
        self.assertTrue(closed.wait(60))

    def test_a_stream_by_name(self) -> None:
        from bulkhead.layout import FLAG

        def stream(worker: FakeWorker) -> None:
            head, _ = worker.expect("infer")
            for part in range(3):
                worker.answer(head["request_id"], [float(part)], offset=64 * part, lease_id=part + 1, flags=FLAG["more"] if part < 2 else 0)
            head, _ = worker.expect("infer")
            worker.answer(head["request_id"], [0.0], flags=FLAG["more"])
            self.cancelled = worker.expect("cancel")[0]["request_id"] == head["request_id"]
            worker.error(head["request_id"], 9)
            worker.expect("infer")

        worker = FakeWorker()
        thread = open_and(worker, stream, features=FEATURE["streaming"])
        daemon = self.daemon(channel_open=lambda c, r: daemon.introduce(worker, c, r))
        client = self.connect(daemon)
        self.assertEqual([part["y"].tolist() for part in client.stream("fake", x=[1.0])], [[0.0], [1.0], [2.0]])
        for part in client.stream("fake", x=[1.0]):
            break
        self.refused("deadline_exceeded", lambda: client.infer("fake", x=[1.0], deadline=-2.0))
        thread.join()
        self.assertTrue(self.cancelled)


class Asynchronous(WithFakeDaemon):
    def run_with(self, daemon: FakeDaemon, work: Any) -> Any:
        async def run() -> Any:
            async with bulkhead.aio.connect(daemon.path) as client:
                return await work(client)

        return asyncio.run(run())

    def test_calls_overlap_and_are_told_apart(self) -> None:
        waiting: list[Any] = []

        def status(connection: Connection, request: dict[str, Any]) -> None:
            waiting.append(request)
            if len(waiting) == 3:  # all at once, the last first, in one packet
                connection.send(*({"jsonrpc": "2.0", "id": one["id"], "result": {"sentence": one["params"]["model"]}} for one in reversed(waiting)))

        async def work(client: bulkhead.aio.Client) -> list[str]:
            return await asyncio.gather(*(client.why(name) for name in "abc"))

        self.assertEqual(self.run_with(self.daemon(model_why=status), work), ["a", "b", "c"])

    def test_all_that_was_asked_of_a_dead_supervisor_is_asked_of_the_next(self) -> None:
        asked: list[Any] = []

        def load(connection: Connection, request: dict[str, Any]) -> None:
            asked.append(request["params"])
            if len(asked) == 2:
                connection.die()
            elif len(asked) > 2:
                connection.answer(request, {"models": [request["params"]["models"][0]]})

        async def work(client: bulkhead.aio.Client) -> list[Any]:
            return await asyncio.gather(client.load("a"), client.load("b"))

        self.assertEqual(self.run_with(self.daemon(model_load=load), work), [["a"], ["b"]])
        self.assertEqual([params.get("again", False) for params in asked], [False, False, True, True])

    def test_a_channel_that_nobody_waits_for_any_more_is_closed(self) -> None:
        worker = FakeWorker()
        self.addCleanup(worker.close)
        asked = threading.Event()
        held: list[Any] = []

        def hold(connection: Connection, request: dict[str, Any]) -> None:
            held.append((connection, request))
            asked.set()

        daemon = self.daemon(channel_open=hold, daemon_info=lambda c, r: c.answer(r, {}))

        async def work(client: bulkhead.aio.Client) -> None:
            task = asyncio.ensure_future(client.open("fake"))
            await asyncio.to_thread(asked.wait, 60)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            daemon.introduce(worker, *held[0])
            await client.info()  # behind it on the same connection
            self.assertEqual(worker.socket.recv(10), b"")

        self.run_with(daemon, work)


if __name__ == "__main__":
    unittest.main()
