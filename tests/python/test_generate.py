"""Tokens as they come, and text: the client's part of generating, against a worker that says what
the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import bulkhead
from bulkhead import __main__ as program
from bulkhead import layout
from bulkhead.layout import FEATURE, FLAG
from bulkhead.protocol import PARTS_MAX
from fake_daemon import FakeDaemon, WithFakeDaemon
from fake_worker import FakeWorker

GENERATE = {"generate": {"inputs": [{"name": "tokens", "dtype": "int64", "shape": ["1..64"]}, {"name": "embeddings", "dtype": "float32", "shape": [1, "1..64", 4]}],
                         "parameters": [{"name": "temperature"}], "codebooks": 1, "length": 1000}}  # fmt: skip


class GeneratingWorker(FakeWorker):
    def part(self, request_id: int, tokens: list[Any], index: int = 0) -> None:
        self.values(request_id, {"tokens": tokens, "index": index}, FLAG["more"])

    def values(self, request_id: int, values: dict[str, Any], flags: int = 0) -> None:
        text = json.dumps(values).encode()
        self.send("result", layout.RESULT.pack(json_bytes=len(text)) + text, request_id, flags)

    def last(self, request_id: int, tokens: list[int], finish: str = "stop") -> None:
        """All tokens as a tensor, and what is told at the end."""
        memory = self.slabs[2]
        for i, token in enumerate(tokens):
            memory[8 * i : 8 * i + 8] = token.to_bytes(8, "little")
        lease = layout.LEASE.pack(slab_id=2, offset_bytes=0, size_bytes=8 * len(tokens), lease_id=self.lease_id())
        tensor = layout.TENSOR.pack(name="tokens", dtype=6, rank=1, lease=lease, dims=[len(tokens)], strides=[1])
        text = json.dumps({"finish": finish, "new_tokens": len(tokens), "prompt_tokens": 3, "reused_tokens": 2, "first_token_ms": 12.5,
                           "tokens_per_second": 20.5}).encode()  # fmt: skip
        self.send("result", layout.RESULT.pack(tensor_count=1, json_bytes=len(text)) + tensor + text, request_id)

    _lease_ids = 0

    def lease_id(self) -> int:
        self._lease_ids += 1
        return self._lease_ids

    def asked(self) -> tuple[int, dict[str, Any], list[int]]:
        """The next infer: its number, its parameters, its prompt."""
        head, body = self.expect("infer")
        said = layout.INFER.unpack(body)
        tensors = self.tensors(body)
        parameters = json.loads(body[layout.INFER.size + len(tensors) * layout.TENSOR.size :] or b"{}")
        lease = tensors[0]["lease"]
        memory = self.slabs[lease["slab_id"]]
        at = lease["offset_bytes"]
        prompt = [int.from_bytes(memory[at + 8 * i : at + 8 * i + 8], "little") for i in range(lease["size_bytes"] // 8)]
        assert said["method"] == "generate"
        return head["request_id"], parameters, prompt


class Serving(WithFakeDaemon):
    def serving(self, *scripts: Any, methods: dict[str, Any] = GENERATE, features: int = FEATURE["streaming"]) -> FakeDaemon:
        """A daemon that introduces one worker after the other, each with a script of its own."""
        failures: list[BaseException] = []
        self.addCleanup(lambda: self.assertEqual(failures, []))

        def live(worker: GeneratingWorker, script: Any) -> None:
            try:
                worker.open(features=features, methods=methods)
                script(worker)
            except BaseException as failure:
                failures.append(failure)
            finally:
                worker.close()

        workers = [GeneratingWorker() for _ in scripts]
        for worker, script in zip(workers, scripts):
            thread = threading.Thread(target=live, args=(worker, script))
            thread.start()
            self.addCleanup(thread.join)
        waiting = iter(workers)
        daemon = self.daemon(channel_open=lambda connection, request: daemon.introduce(next(waiting), connection, request))
        return daemon


class Generating(Serving):
    def test_tokens_come_one_by_one_and_then_what_it_took(self) -> None:
        def script(worker: GeneratingWorker) -> None:
            number, parameters, prompt = worker.asked()
            assert (parameters, prompt) == ({"temperature": 0.5, "stop": [7]}, [1, 2, 3]), (parameters, prompt)
            worker.part(number, [10])
            worker.part(number, [11, 12], 1)
            worker.last(number, [10, 11, 12, 13])
            number, _, _ = worker.asked()
            worker.part(number, [[1, 2], [3, 4]])
            worker.values(number, {"finish": "stop"})

        client = self.connect(self.serving(script))
        generation = client.generate("fake", [1, 2, 3], temperature=0.5, stop=[7])
        self.assertEqual(next(generation), 10)
        self.assertIsNone(generation.finish)
        self.assertEqual(list(generation), [11, 12, 13])
        self.assertEqual((generation.tokens, generation.finish), ([10, 11, 12, 13], "stop"))
        self.assertEqual(generation.statistics["tokens_per_second"], 20.5)
        self.assertEqual(list(client.generate("fake", [[1, 2]])), [[1, 2], [3, 4]], "several codebooks give a list each")

    def test_a_worker_that_does_not_stream_gives_all_at_the_end(self) -> None:
        def script(worker: GeneratingWorker) -> None:
            worker.last(worker.asked()[0], [4, 5], "length")

        client = self.connect(self.serving(script, features=0))
        generation = client.generate("fake", tokens := [1])
        self.assertEqual((list(generation), generation.finish, tokens), ([4, 5], "length", [1]))

    def test_leaving_cancels(self) -> None:
        cancelled = []

        def script(worker: GeneratingWorker) -> None:
            number, _, _ = worker.asked()
            worker.part(number, [1])
            cancelled.append(worker.expect("cancel")[0]["request_id"] == number)
            worker.part(number, [2], 1)
            worker.error(number, 9)
            worker.last(worker.asked()[0], [3])

        client = self.connect(self.serving(script))
        with client.generate("fake", [1]) as generation:
            self.assertEqual(next(generation), 1)
        self.assertEqual(list(client.generate("fake", [1])), [3])
        self.assertEqual(cancelled, [True])

    def test_left_before_its_first_token_it_is_cancelled_too(self) -> None:
        def close(client: bulkhead.Client) -> None:
            generation = client.generate("fake", [1])
            generation.close()
            self.assertEqual(list(generation), [])

        def drop(client: bulkhead.Client) -> None:
            client.generate("fake", [1])

        def drop_parts(client: bulkhead.Client) -> None:
            client.stream("fake", method="generate", tokens=[1])

        def drop_elsewhere(client: bulkhead.Client) -> None:
            held = [client.generate("fake", [1])]
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()

        for leave in (close, drop, drop_parts, drop_elsewhere):
            with self.subTest(leave.__name__):
                done = threading.Event()

                def script(worker: GeneratingWorker) -> None:
                    number, _, _ = worker.asked()
                    assert worker.expect("cancel")[0]["request_id"] == number
                    worker.error(number, 9)
                    done.set()
                    worker.last(worker.asked()[0], [3])  # nor is it cancelled twice

                client = self.connect(self.serving(script))
                leave(client)
                self.assertTrue(done.wait(10), "the worker has heard of it without another call")
                self.assertEqual(list(client.generate("fake", [1])), [3])

    def test_an_adjustment_names_its_generation(self) -> None:
        asked = []

        def script(worker: GeneratingWorker) -> None:
            number, _, _ = worker.asked()
            worker.part(number, [1])
            head, body = worker.expect("infer")
            said = layout.INFER.unpack(body)
            asked.append((said["method"], said["tensor_count"], json.loads(body[layout.INFER.size :]) == {"request": number, "top_k": 5}))
            worker.part(number, [2], 1)
            worker.values(head["request_id"], {})
            worker.last(number, [1, 2, 3])

        generation = self.connect(self.serving(script)).generate("fake", [1])
        self.assertEqual(next(generation), 1)
        generation.adjust(top_k=5)
        self.assertEqual(list(generation), [2, 3])
        self.assertEqual(asked, [("generate.adjust", 0, True)])

    def test_on_a_loop_it_is_sent_with_the_first_token_and_adjusted_after(self) -> None:
        asked = []

        def script(worker: GeneratingWorker) -> None:
            number, _, _ = worker.asked()
            worker.part(number, [1])
            head, body = worker.expect("infer")
            asked.append((layout.INFER.unpack(body)["method"], json.loads(body[layout.INFER.size :]) == {"request": number, "top_k": 5}))
            worker.values(head["request_id"], {})
            worker.last(number, [1, 2])

        daemon = self.serving(script)

        async def run() -> None:
            async with bulkhead.aio.connect(daemon.path) as client:
                await client.generate("fake", [9]).aclose()  # nothing was sent
                generation = client.generate("fake", [1])
                with self.assertRaises(bulkhead.Error) as caught:
                    await generation.adjust(top_k=5)
                self.assertEqual(caught.exception.code, "input_invalid")
                self.assertEqual(await anext(generation), 1)
                await generation.adjust(top_k=5)
                self.assertEqual([token async for token in generation], [2])

        asyncio.run(run())
        self.assertEqual(asked, [("generate.adjust", True)])

    def test_a_worker_that_dies_says_after_how_many_tokens(self) -> None:
        def dies(worker: GeneratingWorker) -> None:
            worker.part(worker.asked()[0], [1, 2, 3])

        def serves(worker: GeneratingWorker) -> None:
            worker.last(worker.asked()[0], [9])

        client = self.connect(self.serving(dies, serves))
        generation = client.generate("fake", [1])
        error = self.refused("worker_lost", lambda: list(generation))
        self.assertIn("after 3 tokens", error.attempt)
        self.assertEqual(generation.tokens, [1, 2, 3])
        self.assertEqual(list(client.generate("fake", [1])), [9], "the next call finds the next worker")

    def test_parts_that_nobody_takes_are_bounded(self) -> None:
        def script(worker: GeneratingWorker) -> None:
            stream, _, _ = worker.asked()
            other, _, _ = worker.asked()
            for i in range(PARTS_MAX + 10):
                worker.part(stream, [i], i)
            assert worker.expect("cancel")[0]["request_id"] == stream
            worker.error(stream, 9)
            worker.last(other, [1])

        client = self.connect(self.serving(script))
        untaken = client.generate("fake", [1])
        self.assertEqual(list(client.generate("fake", [2])), [1])
        self.refused("resources_exhausted", lambda: list(untaken))
        self.assertEqual(untaken.tokens, list(range(PARTS_MAX)))

    def test_asyncio_tells_the_same(self) -> None:
        def script(worker: GeneratingWorker) -> None:
            number, parameters, prompt = worker.asked()
            assert (parameters, prompt) == ({"top_k": 5}, [1, 2])
            worker.part(number, [1])
            worker.part(number, [2], 1)
            worker.last(number, [1, 2])
            number, _, _ = worker.asked()
            worker.part(number, [3])
            assert worker.expect("cancel")[0]["request_id"] == number
            worker.error(number, 9)
            worker.part(worker.asked()[0], [4])

        daemon = self.serving(script)

        async def run() -> None:
            async with bulkhead.aio.connect(daemon.path) as client:
                generation = client.generate("fake", [1, 2], top_k=5)
                self.assertEqual([token async for token in generation], [1, 2])
                self.assertEqual(generation.finish, "stop")
                async with client.generate("fake", [1]) as left:
                    self.assertEqual(await anext(left), 3)
                lost = client.generate("fake", [1])
                with self.assertRaises(bulkhead.Error) as caught:
                    async for _ in lost:
                        pass
                self.assertEqual((caught.exception.code, lost.tokens), ("worker_lost", [4]))
                self.assertIn("after 1 tokens", caught.exception.attempt)

        asyncio.run(run())


class Words(Serving):
    """``python -m bulkhead``, with a tokenizer of a few words that is trained here."""

    def setUp(self) -> None:
        super().setUp()
        try:
            import tokenizers
        except ImportError:
            self.skipTest("the package tokenizers is not installed")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.package = Path(folder.name)
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>", "<user>", "<model>"], show_progress=False,
                                                 initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
        tokenizer.train_from_iterator(["Mercury, Venus and Earth orbit the Sun"], trainer)
        tokenizer.save(str(self.package / "tokenizer.json"))
        self.tokenizer = tokenizer
        (self.package / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
        (self.package / "chat_template.jinja").write_text(
            "{% for message in messages %}\n{{ '<' + message.role + '>' + message.content + eos_token }}\n{%- endfor %}\n"
            "{% if add_generation_prompt %}{{ '<model>' }}{% endif %}"
        )
        self.methods = {"generate": {**GENERATE["generate"], "package": str(self.package)}}

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def ran(self, daemon: Any, *arguments: str, typed: str | bytes = "") -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        stdin = io.TextIOWrapper(io.BytesIO(typed if isinstance(typed, bytes) else typed.encode()), "utf-8")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("sys.stdin", stdin):
            status = program.main([arguments[0], "--socket", str(daemon.path), *arguments[1:]])
        return status, out.getvalue(), err.getvalue()

    def introduced(self, worker: GeneratingWorker) -> None:
        """The first channel, on which the program only looks."""

    def answering(self, prompt: str, answer: str, **expected: Any) -> Any:
        ids = self.ids(answer)

        def script(worker: GeneratingWorker) -> None:
            number, parameters, asked = worker.asked()
            assert asked == self.ids(prompt), (self.tokenizer.decode(asked, skip_special_tokens=False), prompt)
            assert parameters == expected, parameters
            for i, token in enumerate(ids):
                worker.part(number, [token], i)
            worker.last(number, [*ids, 0])

        return script

    def test_a_text_is_put_through_the_chat_template_and_answered_in_words(self) -> None:
        daemon = self.serving(self.introduced, self.answering("<user>Earth?<end><model>", "Vénus 金星 ☀", temperature=0, seed=7), methods=self.methods)
        status, out, err = self.ran(daemon, "generate", "--temperature", "0", "--seed", "7", "fake", "Earth?")
        self.assertEqual((status, out), (0, "Vénus 金星 ☀\n"), err)
        self.assertIn("tokens (stop), 20.5 tokens/s, the first after 12 ms; prompt of 3, 2 of them known already", err)

    def test_raw_text_goes_as_it_is_and_json_tells_all(self) -> None:
        daemon = self.serving(self.introduced, self.answering("Mercury, ", "Venus"), methods=self.methods)
        status, out, _ = self.ran(daemon, "generate", "fake", "--raw", "--json", "-", typed="Mercury, ")
        *pieces, last = map(json.loads, out.splitlines())
        self.assertEqual(status, 0)
        self.assertEqual("".join(piece["text"] for piece in pieces), "Venus")
        self.assertEqual([piece["token"] for piece in pieces], [*self.ids("Venus"), 0])
        self.assertEqual((last["text"], last["tokens"], last["finish"]), ("Venus", [*self.ids("Venus"), 0], "stop"))

    def test_a_conversation_goes_on_and_outlives_its_worker(self) -> None:
        def dies(worker: GeneratingWorker) -> None:
            number, _, asked = worker.asked()
            assert asked == self.ids("<system>short<end><user>Sun<end><model>"), asked
            worker.part(number, self.ids("Mer"))

        first = self.answering("<system>short<end><user>Sun<end><model>", "Earth")
        second = self.answering("<system>short<end><user>Sun<end><assistant>Earth<end><user>and<end><model>", "Venus")

        def both(worker: GeneratingWorker) -> None:
            first(worker), second(worker)

        daemon = self.serving(self.introduced, dies, both, methods=self.methods)
        status, out, err = self.ran(daemon, "chat", "fake", "--system", "short", typed="Sun\nSun\n\nand\n")
        self.assertEqual((status, out), (0, "Mer\nEarth\nVenus\n"), err)
        self.assertIn("after", err)
        self.assertIn("(worker_lost)", err)

    def test_a_conversation_longer_than_a_sequence_goes_on_without_its_oldest_turns(self) -> None:
        second = "<system>short<end><user>Sun<end><assistant>Earth<end><user>and<end><model>"
        third = "<system>short<end><user>and<end><assistant>Venus<end><user>Sun<end><model>"
        room = {"max_new_tokens": 2}
        scripts = [self.answering("<system>short<end><user>Sun<end><model>", "Earth", **room), self.answering(second, "Venus", **room),
                   self.answering(third, "Mercury", **room)]  # fmt: skip
        self.methods["generate"]["length"] = max(len(self.ids(second)), len(self.ids(third))) + 2

        def all_three(worker: GeneratingWorker) -> None:
            for script in scripts:
                script(worker)

        daemon = self.serving(self.introduced, all_three, methods=self.methods)
        status, out, err = self.ran(daemon, "chat", "fake", "--system", "short", "--max-new-tokens", "2", typed="Sun\nand\nSun\n")
        self.assertEqual((status, out), (0, "Earth\nVenus\nMercury\n"), err)
        self.assertEqual(err.count("the oldest 1 of 2 questions are left out"), 1, err)

    def test_a_quarter_of_a_sequence_is_kept_for_the_answer(self) -> None:
        question = "<user>Sun<end><model>"
        self.methods["generate"]["length"] = len(self.ids("<user>and<end><assistant>Venus<end>" + question)) + 4

        def both(worker: GeneratingWorker) -> None:
            self.answering("<user>and<end><model>", "Venus")(worker)
            self.answering(question, "Earth")(worker)

        status, out, err = self.ran(self.serving(self.introduced, both, methods=self.methods), "chat", "fake", typed="and\nSun\n")
        self.assertEqual((status, out), (0, "Venus\nEarth\n"), err)
        self.assertIn("the oldest 1 of 1 questions are left out", err)

    def test_text_that_is_none_is_told_and_a_conversation_goes_on(self) -> None:
        status, out, err = self.ran(self.serving(self.introduced, methods=self.methods), "generate", "fake", "Sun \udcff")
        self.assertEqual((status, out), (1, ""))
        self.assertIn("error: text to tokens: '\\udcff' is not a character (input_invalid)", err)

        daemon = self.serving(self.introduced, self.answering("<user>Sun<end><model>", "Earth"), methods=self.methods)
        status, out, err = self.ran(daemon, "chat", "fake", typed=b"\xff\nSun\n")
        self.assertEqual((status, out), (0, "Earth\n"), err)
        self.assertIn("'\\udcff' is not a character", err)

    def test_what_cannot_be_said_in_words_is_refused(self) -> None:
        (self.package / "chat_template.jinja").write_text("{{ raise_exception('no ' + messages[0].role) }}")
        cases = {
            "no method `generate`": ({"forward": {"inputs": [], "parameters": [], "outputs": []}}, "method_unknown"),
            "codebooks": ({"generate": {**self.methods["generate"], "codebooks": 8}}, "input_invalid"),
            "tokenizer.json is not there": ({"generate": {**self.methods["generate"], "package": "/nowhere"}}, "input_invalid"),
            "the chat template refuses the conversation: no user": (self.methods, "input_invalid"),
        }
        for words, (methods, code) in cases.items():
            with self.subTest(words):
                status, out, err = self.ran(self.serving(self.introduced, methods=methods), "generate", "fake", "x")
                self.assertEqual((status, out), (1, ""))
                self.assertIn(words, err)
                self.assertIn(f"({code})", err)

    def test_wrong_usage_and_no_daemon_have_statuses_of_their_own(self) -> None:
        for wrong in (["generate", "m"], ["generate", "m", "x", "--temperature", "nan"], ["fly"], []):
            with self.assertRaises(SystemExit) as caught, contextlib.redirect_stderr(io.StringIO()):
                program.main(wrong)
            self.assertEqual(caught.exception.code, 2, wrong)
        with contextlib.redirect_stderr(io.StringIO()) as err:
            self.assertEqual(program.main(["generate", "--socket", str(self.package / "none.sock"), "m", "x", "--json"]), 3)
        self.assertEqual(json.loads(err.getvalue())["error"]["code"], "not_running")


if __name__ == "__main__":
    unittest.main()
