"""The bench "engines": engines in Python in a worker of their own, against the same class called
in-process by the same Python.

    engines.py [MODEL...] [--rounds N] [--reloads N] [--looks N...]

BULKHEAD_BUILD names the build folder; MODELs are some of those that are printed, instead of all.
Rounds alternate, and each line names its baseline. The models are small and have random weights: a
step of "qwen3-vl-tiny" takes about 1 ms, one of "qwen3-vl" about 10 ms, which is nearer to a true
model's. After each reload the program in-process is started again too, and the swings of both are
told. "beside a spinning thread" has a thread in the caller's process that runs Python without end,
as ComfyUI's may. In-process it would share the interpreter with the engine: a sentence of 7 s then
took minutes and is not measured. Models named "one-thread" compute with one thread on both sides,
so that a core is left for the client: on a machine of two cores the others share theirs with it.
With `--looks` the models are measured with so many looks of OpenMP's threads for work before they
sleep (GOMP_SPINCOUNT) instead: alone, beside the spinning thread, and two workers at once.
The node's lines are what a run of a ComfyUI node costs whose engine gives back what it gets: a
connection and a channel, model management, layouts, and the worker.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("BULKHEAD_BUILD", ROOT / "build"))
sys.path[:0] = [str(ROOT / folder) for folder in ("clients/python", "clients", "tests/python/engines", "tests/python/comfyui")]

import bulkhead  # noqa: E402

REQUESTS_OF_A_RELOAD = 15
PEERS = Path(__file__).parent / "peers"
CHATTERBOX = ROOT / "build/chatterbox"
#: Where both sides find the engines that are not Bulkhead's own.
PYTHONPATH = os.pathsep.join(map(str, (PEERS, ROOT / "tests/python/engines", CHATTERBOX)))
VOICE = {"text": "Bulkhead keeps each model in a process of its own, and ends that process to unload it."}
SHORT_VOICE = {"text": "Bulkhead keeps each model in a process of its own."}
ANSWER = {"prompt": "What is in the picture?", "max_new_tokens": 32, "do_sample": False}
SPEECH = {"text": "Bulkhead keeps each model in a process of its own.", "max_new_tokens": 48, "temperature": 0.0}
#: Sizes of a language model whose step takes about 10 ms here.
MIDDLE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


class Spinner:
    """A thread that runs Python without end, inside `with`."""

    def __enter__(self) -> None:
        self._ended = False
        self._thread = threading.Thread(target=self._spin)
        self._thread.start()

    def _spin(self) -> None:
        while not self._ended:
            pass

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()


class InProcess:
    """A Python process that calls an engine's class itself, with further variables in
    its environment."""

    lost = ""  #: why it takes no further part

    def __init__(self, engine: str, options: dict[str, Any], **variables: str) -> None:
        arguments = [sys.executable, str(PEERS / "engine_in_process.py"), engine, json.dumps(options)]
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, **variables}
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def seconds(self, method: str, parameters: dict[str, Any]) -> float:
        """NaN once it is lost."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"method": method, "parameters": parameters}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self.lost = f"engine_in_process.py ended early, with status {self._process.wait()}"
        return float(line or "nan")

    def end(self) -> None:
        self._process.communicate()


def in_worker(client: bulkhead.Client, model: str, method: str, parameters: dict[str, Any]) -> float:
    begun = time.monotonic()
    for part in client.stream(model, method=method, parameters=parameters):
        for tensor in part.values():
            tensor.numpy().copy()
    return time.monotonic() - begun


#: How OpenMP's threads wait: by libgomp's own default, or as they do in workers.
MANY = {"in-process": {}, "in-process, as there": {"GOMP_SPINCOUNT": "2000"}}
ONE = {"in-process": {"OMP_NUM_THREADS": "1"}}


def compare(client: bulkhead.Client, model: str, engine: str, options: dict[str, Any], method: str, parameters: dict[str, Any], rounds: int,
            environments: dict[str, dict[str, str]]) -> None:  # fmt: skip
    """The speed in the worker over the speed in-process: 1 is equal, above it the
    worker is faster."""
    peers = {name: InProcess(engine, options, **variables) for name, variables in environments.items()}
    taken: dict[str, list[float]] = {name: [] for name in ("worker", *peers, "worker, spinning")}
    try:
        in_worker(client, model, method, parameters)
        for peer in peers.values():
            peer.seconds(method, parameters)
        for _ in range(rounds):
            taken["worker"].append(in_worker(client, model, method, parameters))
            for name, peer in peers.items():
                taken[name].append(peer.seconds(method, parameters))
            with Spinner():
                taken["worker, spinning"].append(in_worker(client, model, method, parameters))
    finally:
        for peer in peers.values():
            peer.end()
    print(f"{model}: {method}, {rounds} rounds")
    for name, peer in peers.items():
        if peer.lost:
            print(f"  without {name}: {peer.lost}")
            del taken[name]
    middle = {name: statistics.median(seconds) for name, seconds in taken.items()}
    for name, seconds in middle.items():
        print(f"  {name:<24} median {1000 * seconds:8.1f} ms   min {1000 * min(taken[name]):8.1f}   max {1000 * max(taken[name]):8.1f}")
    if "in-process" in middle:
        print(f"  speed in the worker : in-process                                   {middle['in-process'] / middle['worker']:.3f}   goal 0.98")
    if "in-process, as there" in middle:
        print(f"  speed in the worker : in-process, OpenMP's threads as in workers     {middle['in-process, as there'] / middle['worker']:.3f}")
    if "in-process" in middle:
        print(f"  worker beside a spinning thread : in-process without one           {middle['in-process'] / middle['worker, spinning']:.3f}   goal 0.98")
    print()


def compare_looks(client: bulkhead.Client, model: str, engine: str, options: dict[str, Any], method: str, parameters: dict[str, Any], rounds: int,
                  looks: list[int]) -> None:  # fmt: skip
    """The same while OpenMP's threads look for work so often before they sleep."""
    pairs = {count: (f"{model}-looks-{count}", f"{model}-looks-{count}-too") for count in looks}
    peer = InProcess(engine, options)
    taken: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        taken.setdefault(name, []).append(seconds)

    def ask(name: str) -> float:
        return in_worker(client, name, method, parameters)

    try:
        peer.seconds(method, parameters)
        for pair in pairs.values():
            client.load(*pair)
            for name in pair:
                ask(name)
        with ThreadPoolExecutor(2) as threads:
            for _ in range(rounds):
                note("in-process", peer.seconds(method, parameters))
                for count, pair in pairs.items():
                    note(f"{count} looks", ask(pair[0]))
                    with Spinner():
                        note(f"{count} looks, spinning", ask(pair[0]))
                    note(f"{count} looks, two at once", statistics.mean(threads.map(ask, pair)))
    finally:
        peer.end()
        for pair in pairs.values():
            client.unload(*pair)
    print(f"{model}: {method}, {rounds} rounds{'; ' + peer.lost if peer.lost else ''}")
    alone = statistics.median(taken["in-process"])
    for name, seconds in taken.items():
        middle, low, high = (1000 * told(seconds) for told in (statistics.median, min, max))
        print(f"  {name:<28} median {middle:8.1f} ms   min {low:8.1f}   max {high:8.1f}   speed : in-process {1000 * alone / middle:.3f}")
    print()


def reloads(client: bulkhead.Client, model: str, engine: str, options: dict[str, Any], method: str, parameters: dict[str, Any], count: int,
            variables: dict[str, str]) -> None:  # fmt: skip
    """The speed after each of so many reloads, beside that of the program in-process after as many
    starts; how long an unload takes until its receipt."""
    receipts, loads, lost = [], [], ""
    middles: dict[str, list[float]] = {"worker": [], "in-process": []}
    client.load(model)
    for _ in range(count):
        begun = time.monotonic()
        receipt = client.unload(model)[0]
        receipts.append(time.monotonic() - begun)
        if not receipt["verified"]:
            raise SystemExit(f"a receipt is not verified: {receipt}")
        begun = time.monotonic()
        client.load(model)
        loads.append(time.monotonic() - begun)
        peer = InProcess(engine, options, **variables)
        try:
            in_worker(client, model, method, parameters)
            peer.seconds(method, parameters)
            taken = [(in_worker(client, model, method, parameters), peer.seconds(method, parameters)) for _ in range(REQUESTS_OF_A_RELOAD)]
        finally:
            peer.end()
        for middle, seconds in zip(middles.values(), zip(*taken)):
            middle.append(statistics.median(seconds))
        lost = lost or peer.lost
    print(f"{model}: {count} reloads, and as many starts in-process; the median of {REQUESTS_OF_A_RELOAD} requests after each, by turns")
    if lost:
        print(f"  without in-process: {lost}")
        del middles["in-process"]
    for name, seconds in middles.items():
        swing = (max(seconds) - min(seconds)) / statistics.median(seconds)
        goal = "   goal 0.02" if name == "worker" else ""
        print(f"  (slowest - fastest) / median, {name:<37} {swing:.3f}{goal}")
    print(f"  unload until the receipt: median {1000 * statistics.median(receipts):.0f} ms; load: median {1000 * statistics.median(loads):.0f} ms\n")


def node_overhead(user: str, rounds: int) -> None:
    import stand_in_interface
    import stand_in_manager
    import torch

    stand_in_interface.install(user)
    stand_in_manager.Manager().install()
    from comfyui import answers, layouts

    async def ignored(part: Any) -> None:
        pass

    sound = {"waveform": torch.rand(1, 2, 30 * 44100) * 2 - 1, "sample_rate": 44100}
    image = torch.rand(1, 1024, 1024, 3)
    cases: list[tuple[str, str, Any, Any, Callable[[Any], Any]]] = [
        ("30 s of AUDIO, stereo at 44.1 kHz", "sound", sound, sound["waveform"], lambda made: layouts.audio(made, 44100)["waveform"]),
        ("an IMAGE of 1024 x 1024", "image", image, image, layouts.image),
        ("an IMAGE of 1 x 1", "image", image[:, :1, :1], image[:, :1, :1], layouts.image),
    ]
    print("a ComfyUI node's own cost: its whole run, with a worker that gives back what it gets")
    for name, method, given, tensor, back in cases:
        copy, node = [], []
        for _ in range(rounds):
            begun = time.monotonic()
            kept = tensor.clone()
            copy.append(time.monotonic() - begun)
            begun = time.monotonic()
            made = back(asyncio.run(answers.ask("echo", method, {"x": given}, ignored)).tensors["out"])
            node.append(time.monotonic() - begun)
        if not torch.equal(made, kept):
            raise SystemExit(f"{name} changed on its way")
        once, whole = (1000 * statistics.median(seconds) for seconds in (copy, node))
        print(f"  {name:<34} median {whole:6.1f} ms = {whole / once:6.1f} x one copy of it ({once:.3f} ms)")


def chatterbox(folder: Path) -> tuple[str, dict[str, Any], str, dict[str, Any]]:
    sys.path.append(str(CHATTERBOX))
    import small_chatterbox

    folder.mkdir()
    options = {"model": str(small_chatterbox.chatterbox(folder)), "cache_lengths": [512]}
    return "small_chatterbox:SmallChatterBox", options, "speak", {"text": SPEECH["text"], "max_new_tokens": 30}


def main() -> None:
    parser = argparse.ArgumentParser(usage="%(prog)s [MODEL...] [--rounds N] [--reloads N] [--looks N...]", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--reloads", type=int, default=10)
    parser.add_argument("--looks", type=int, nargs="+", default=[])
    parser.add_argument("models", metavar="MODEL", nargs="*")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    import small_models

    with tempfile.TemporaryDirectory() as folder:
        os.environ["BULKHEAD_SOCKET"] = f"{folder}/run/control.sock"
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 8, 8], "mrope_interleaved": True}
        voice, vision, speech = (f"bulkhead.engines.{name}" for name in ("small_voice:SmallVoice", "qwen3_vl:Qwen3VL", "higgs_audio_v2:HiggsAudio"))
        sizes = {"text": {**MIDDLE, "rope_parameters": rope}, "vision": {"out_hidden_size": MIDDLE["hidden_size"]}}

        def loaded(path: Path) -> dict[str, Any]:
            return {"model": str(path), "cache_lengths": [1024]}

        here = Path(folder)
        makers: dict[str, Callable[[], tuple[str, dict[str, Any], str, dict[str, Any]]]] = {
            "small-voice": lambda: (voice, {}, "speak", VOICE),
            "qwen3-vl-tiny": lambda: (vision, loaded(small_models.qwen3_vl(here / "qwen")), "answer", ANSWER),
            "qwen3-vl": lambda: (vision, loaded(small_models.qwen3_vl(here / "qwen-middle", **sizes)), "answer", ANSWER),
            "higgs-audio": lambda: (speech, loaded(small_models.higgs_audio_v2(here / "higgs", text=MIDDLE)), "speak", SPEECH),
        }
        if CHATTERBOX.is_dir():
            makers["chatterbox"] = lambda: chatterbox(here / "chatterbox")
        else:
            print(f"chatterbox is left out: there is no {CHATTERBOX.relative_to(ROOT)}, which `scripts/install --tests` makes\n")
        known = [*makers, *(f"{name}-one-thread" for name in makers), "echo"]
        chosen = options.models or known
        if absent := [name for name in chosen if name not in known]:
            parser.error(f"there is no {absent[0]}: there are {', '.join(known)}")
        if options.looks and not {*makers} & {*chosen}:
            parser.error(f"--looks measures models of several threads: {', '.join(makers)}")
        engines = {name: make() for name, make in makers.items() if {name, f"{name}-one-thread"} & {*chosen}}
        python: dict[str, Any] = {"runtime": "python", "interpreter": sys.executable, "device": "cpu", "environment": {"PYTHONPATH": PYTHONPATH}}
        models: dict[str, Any] = {"echo": {**python, "engine": "echo_engine:Echo"}}
        for name, (engine, given, _, _) in engines.items():
            models[name] = {**python, "engine": engine, "options": given}
            models[f"{name}-one-thread"] = {**models[name], "threads": 1}
            for count in options.looks:
                environment = {**python["environment"], "GOMP_SPINCOUNT": str(count)}
                for suffix in ("", "-too"):
                    models[f"{name}-looks-{count}{suffix}"] = {**models[name], "environment": environment}
        fleet = Path(folder) / "fleet.json"
        fleet.write_text(json.dumps({"version": 1, "models": models}))
        program = str(BUILD / "bin/bulkhead")
        subprocess.run([program, "up", str(fleet)], check=True, stdout=subprocess.DEVNULL)
        try:
            with bulkhead.connect(name="bench") as client:
                if options.looks:
                    for name, given in engines.items():
                        if name in chosen:
                            compare_looks(client, name, *given, options.rounds, options.looks)
                    return
                for suffix, environments in (("", MANY), ("-one-thread", ONE)):
                    for name, given in engines.items():
                        if (model := name + suffix) in chosen:
                            client.load(model)
                            compare(client, model, *given, options.rounds, environments)
                            client.unload(model)
                    if options.reloads and (model := f"small-voice{suffix}") in chosen:
                        reloads(client, model, voice, {}, "speak", SHORT_VOICE, options.reloads, list(environments.values())[-1])
                if "echo" in chosen:
                    with ThreadPoolExecutor(1) as thread:  # as ComfyUI runs prompts
                        thread.submit(node_overhead, folder, options.rounds).result()
        finally:
            subprocess.run([program, "down"], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
