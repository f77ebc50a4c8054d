"""Generation on a GPU, as ratios that were measured in one run: bench.py --build BUILD [--out DIR]
[--models NAME,…]

Exports models of true size with random weights (models.py), serves them by the daemon of BUILD, and
writes one results file, DIR/generation-DATE.json, and the same as a table on standard output. What
could not be measured stands there with its reason. `--rehearse` goes the same way on a CPU with a
tiny model: it proves that this script works, and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "clients" / "python"))

import bulkhead  # noqa: E402

MODELS = ["qwen3_4b", "higgs_v2", "t3_guided", "t3_single"]
QUANTISED = ("int8", "int4")  # NAME_int8 is the model NAME, exported with --weights int8
BUCKETS = {"qwen3_4b": [512, 1024, 2048], "higgs_v2": [512, 1024, 2048], "t3_guided": [512, 1024], "t3_single": [512, 1024], "rehearsal": [64, 256]}
ALL_SAMPLING = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1, "do_sample": True, "seed": 1}
REPEATS = 5
CYCLES = 10
TOGETHER = (2, 4, 8)  # sequences, in the first model; the last is the number of its slots
ROUNDS = 3  # of each number of them
KILLS = 3  # of one model; five would quarantine it
REMEMBERED = 1024  # steps of which a worker tells the percentiles
THEIRS, THEIRS_SHORT = 64, 8  # tokens of upstream's own generations
FAMILIES = {"higgs_v2": "higgs_audio_v2", "t3_guided": "chatterbox_t3"}  # causal_lm, the others


class Results:
    """Kept in `file` row by row: whatever ends the script, what was measured is there."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []

    def keep(self, **row: Any) -> None:
        self.rows.append(row)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.rows, indent=1) + "\n")
        partial.replace(self.file)

    def add(self, model: str, row: str, value: float, goal: str, **parts: float) -> None:
        self.keep(model=model, row=row, value=value, goal=goal, **parts)
        told = ", ".join(f"{name} {part:.6g}" for name, part in parts.items())
        print(f"{model:<10} {row:<52} {value:8.3f}  goal {goal:<8} {told}", flush=True)

    def missing(self, model: str, row: str, reason: str) -> None:
        self.keep(model=model, row=row, value=None, reason=reason)
        print(f"{model:<10} {row:<52} not measured: {reason}", flush=True)


class Faulty(Exception):
    """A measurement that did not measure what it should."""


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.device = "cpu" if options.rehearse else "cuda"
        self.models: list[str] = ["rehearsal"] if options.rehearse else options.models.split(",")
        self.of_several = self.models[0]  # it is served with several slots too
        self.results = Results(Path(options.out) / f"generation-{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%SZ}.json")
        self.socket = str(folder / "run" / "control.sock")
        self.packages = Path(options.packages) if options.packages else folder / "packages"

    def export(self, model: str) -> bool:
        folder = self.packages / model
        if (folder / "manifest.json").is_file():
            return True
        name, weights = quantised(model)
        command = [sys.executable, "-m", "bulkhead.export", f"{ROOT}/tests/gpu/generation/models.py:{name}", str(folder), "--device", self.device,
                   *(["--weights", weights] if weights else []), "--dtype", "bfloat16" if self.device == "cuda" else "float32", "--length", str(buckets(model)[-1]),
                   "--buckets", ",".join(map(str, buckets(model))), "--slots", "1",
                   "--slots-max", str(TOGETHER[-1] if model == self.of_several else 1),
                   "--tokens", "0"]  # fmt: skip
        if name == "t3_guided":
            command += ["--family", "chatterbox_t3"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": f"{ROOT}/clients/python:{os.environ.get('PYTHONPATH', '')}"})
        if done.returncode != 0:
            self.results.missing(model, "all", f"its export failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
        return done.returncode == 0

    def fleet(self) -> Path:
        """Each model with graphs, and eagerly; one also with several slots."""
        lines = ["version: 1", f"defaults: {{device: {'cuda:0' if self.device == 'cuda' else 'cpu'}}}", "models:"]
        captured = "required" if self.device == "cuda" else "off"
        for model in self.models:
            served = [(model, captured, 1), (f"{model}-eager", "off", 1)]
            if model == self.of_several:
                served.append((f"{model}-slots", captured, TOGETHER[-1]))
            for name, graphs, slots in served:
                lines += [f"  {name}:", "    runtime: generate", f"    package: {self.packages / model}", f"    graphs: {graphs}",
                          f"    generate: {{slots: {slots}, length: {buckets(model)[-1]}}}"]  # fmt: skip
        path = self.folder / "fleet.yaml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def program(self, *arguments: str) -> None:
        command = [str(Path(self.options.build) / "bin" / "bulkhead"), "--socket", self.socket, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"bulkhead {arguments[0]}: {done.stderr}")

    # --- what is measured

    def prompt(self, client: bulkhead.Client, model: str, length: int) -> dict[str, Any]:
        """By what the model declares; its first number differs each time, so that no prefix is
        known already."""
        import torch

        with client.open(model) as channel:
            described = channel.methods["generate"]
        inputs = {one["name"]: one for one in described["inputs"]}
        self.first = getattr(self, "first", 9) + 1
        if "embeddings" in inputs:
            rows, _, width = inputs["embeddings"]["shape"]
            return {"embeddings": torch.randn(rows, length, width).to(getattr(torch, inputs["embeddings"]["dtype"]))}
        ids = [self.first % described["vocabulary"], *range(10, 9 + length)]
        codebooks = described.get("codebooks", 1)
        return {"tokens": ids if codebooks == 1 else [[one, *[-1] * (codebooks - 1)] for one in ids]}

    def sequence(self, client: bulkhead.Client, model: str, length: int = 16, count: int = 128, prompt: dict[str, Any] | None = None,
                 **sampling: Any) -> dict[str, Any]:  # fmt: skip
        """What the worker says of the steps of one sequence, and when its first token was here.
        With a `prompt` nothing asks for the model before the sequence does."""
        prompt = prompt or self.prompt(client, model, length)
        rules: dict[str, Any] = {"max_new_tokens": count, "ignore_stop": True}
        if delay := self.manifest(model)["delay_pattern"]:
            rules["banned"] = delay["eos"]  # it ends by its own pattern, which no stop token is
        with client.generate(model, None, prompt, **rules, **(sampling or {"temperature": 0})) as generation:
            next(generation)
            first = time.monotonic()
            for _ in generation:
                pass
        if len(generation.tokens) != count:
            raise Faulty(f"a sequence of {model} ended after {len(generation.tokens)} of {count} steps ({generation.finish})")
        return {"first_at": first, **generation.statistics}

    def rate(self, client: bulkhead.Client, model: str, **options: Any) -> float:
        return statistics.median(self.sequence(client, model, **options)["tokens_per_second"] for _ in range(REPEATS))

    def told(self, client: bulkhead.Client, model: str) -> dict[str, Any]:
        row = next(row for row in client.ps() if row["model"] == model)
        return row["generate"] or {}

    def manifest(self, model: str) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.packages / model.removesuffix("-eager").removesuffix("-slots") / "manifest.json").read_text())
        return read

    def weight_bytes(self, model: str) -> float:
        return float(self.manifest(model)["weights"]["bytes"])

    def step_bytes(self, model: str) -> float:
        """Weights that a step of one sequence reads: of what decode asks for, all but tables of
        embeddings, of which it reads a row or some. A table that is the head's too goes by the
        head's name, or has no other tensor of the head's shape beside it."""
        from bulkhead.export import functions

        said = self.manifest(model)
        stored = weights_of(self.packages / model / said["weights"]["file"])
        renamed = said["constants"].get("decode.pt2", {})
        read = {name: stored[renamed.get(name, name)] for name in functions.load(self.packages / model / "decode.pt2").get_constant_fqns()}
        tables = {name for name in read if "emb" in name and name.endswith(".weight")}
        head = said["vocabulary"] * said["codebooks"]
        rows_of_others = {shape[0] for name, (shape, _) in read.items() if name not in tables and shape}
        counted = {name for name, (shape, _) in read.items() if name not in tables or (shape[0] == head and head not in rows_of_others)}
        return float(sum(read[name][1] for name in counted))

    def run(self, client: bulkhead.Client) -> None:
        reads, pinned = (bandwidths() if self.device == "cuda" else ({"none": 1e10}, 1e10))
        read = max(reads.values())
        self.results.keep(row="device", read_bytes_per_second=read, reads=reads, pinned_copy_bytes_per_second=pinned, name=device_name())
        print(f"{device_name()}: {', '.join(f'{how} {rate / 1e9:.0f} GB/s' for how, rate in reads.items())}, pinned copy {pinned / 1e9:.1f} GB/s", flush=True)
        for model in self.models:
            with self.attempted(model, "what follows of its steps"):
                self.steps(client, model, read)
            if model == self.of_several:
                with self.attempted(model, "sequences side by side"):
                    self.side_by_side(client, model)
            with self.attempted(model, "graph : upstream eager"):
                self.upstream(client, model)
            with self.attempted(model, "its unload"):
                client.unload(model, f"{model}-eager", *([f"{model}-slots"] if model == self.of_several else []))
        if {"t3_guided", "t3_single"} <= set(self.models):
            with self.attempted("t3", "guided step / single step"):
                guided, single = self.rate(client, "t3_guided"), self.rate(client, "t3_single")
                self.results.add("t3", "guided step / single step", single / guided, "<= 1.15", guided=guided, single=single)
            with self.attempted("t3", "its unload"):
                client.unload("t3_guided", "t3_single")
        with self.attempted(self.models[0], "what follows of unloads and loads"):
            self.cycles(client, self.models[0], pinned)
        with self.attempted(self.models[0], "kill to the next first token"):
            self.succession(client, self.models[0], self.models[1] if len(self.models) > 1 else f"{self.models[0]}-eager", pinned)

    @contextlib.contextmanager
    def attempted(self, model: str, row: str) -> Iterator[None]:
        """What fails is told, and the rest is measured nevertheless."""
        try:
            yield
        except Exception as wrong:
            self.results.missing(model, row, f"{type(wrong).__name__}: {wrong}")

    def steps(self, client: bulkhead.Client, model: str, read: float) -> None:
        add = self.results.add
        client.load(model)
        self.sequence(client, model)
        greedy = self.rate(client, model)
        weights = self.step_bytes(model)
        add(model, "bytes of a step / (its time x read bandwidth)", weights * greedy / read, ">= 0.65", tokens_per_second=greedy, step_bytes=weights)
        sampled = self.rate(client, model, **({**ALL_SAMPLING, "repetition_penalty": 1} if model == "higgs_v2" else ALL_SAMPLING))
        add(model, "step with the full sampler / greedy step", greedy / sampled, "<= 1.05", sampled=sampled)
        before = self.told(client, model)
        said = self.sequence(client, model, count=buckets(model)[-1] - 32)
        after = self.told(client, model)
        if self.device == "cuda":
            on_gpu = (after["device_ms"] - before["device_ms"]) / (stepped(after) - stepped(before))
            add(model, "time on the GPU / wall of a token", on_gpu / 1e3 * said["tokens_per_second"], ">= 0.97", device_ms=on_gpu)
        else:
            self.results.missing(model, "time on the GPU / wall of a token", "no GPU")
        for bucket in buckets(model)[:-1]:
            self.crossing(client, model, bucket)
        after = self.told(client, model)
        new_eager = sum(after.get("eager", {}).values()) - sum(before.get("eager", {}).values())
        add(model, "eager steps meanwhile", new_eager, "0" if self.device == "cuda" else "all")
        client.load(f"{model}-eager")
        self.sequence(client, f"{model}-eager")
        eager = self.rate(client, f"{model}-eager")
        add(model, "graph : own eager", greedy / eager, ">= 1.3", eager=eager)
        client.unload(f"{model}-eager")

    def crossing(self, client: bulkhead.Client, model: str, bucket: int) -> None:
        """As many steps as the worker remembers, or as there are positions: about the end of this
        bucket, as far as they go. Where fewer fit than it remembers (T3: 1,008), the few left of
        the sequence before are in the percentiles too; where as many fit, those about the end of
        bucket 512 go on over that of 1,024."""
        length = max(16, bucket - REMEMBERED // 2)
        count = min(REMEMBERED, buckets(model)[-1] - length)
        assert length + count > bucket
        self.sequence(client, model, length=length, count=count)
        steps = self.told(client, model)["step_ms"]
        self.results.add(model, f"p99 / p50 of a step, across the end of bucket {bucket}", steps["p99"] / steps["p50"], "<= 1.2", p50_ms=steps["p50"],
                         p99_ms=steps["p99"])  # fmt: skip

    def side_by_side(self, client: bulkhead.Client, model: str) -> None:
        """A sequence alone where there is room for several, by turns with one in a model of one
        slot; then several, by the sum of the rates that the worker reports."""
        several, slots = f"{model}-slots", TOGETHER[-1]
        client.load(model)
        client.load(several)
        self.sequence(client, several)
        pairs = [(self.sequence(client, several), self.sequence(client, model)) for _ in range(REPEATS)]
        lone, of_one = (statistics.median(said["tokens_per_second"] for said in side) for side in zip(*pairs, strict=True))
        self.results.add(model, f"a lone sequence in {slots} slots / in a model of one", lone / of_one, "1", lone=lone, of_one=of_one)
        for count in TOGETHER:
            with ThreadPoolExecutor(count) as pool:
                all_of_them = [self.at_once(pool, client, several, count) for _ in range(ROUNDS)]
            rate = statistics.median(all_of_them)
            self.results.add(model, f"{count} sequences together / one", rate / lone, "-", all_of_them=rate, one=lone)
        client.unload(several)

    def at_once(self, pool: ThreadPoolExecutor, client: bulkhead.Client, model: str, count: int) -> float:
        """So long that they are together for nearly all of their steps."""
        tokens = min(512, buckets(self.of_several)[-1] - 32)
        prompts = [self.prompt(client, model, 16) for _ in range(count)]

        def one(prompt: dict[str, Any]) -> float:
            with bulkhead.connect(self.socket, name="bench") as own:
                return float(self.sequence(own, model, count=tokens, prompt=prompt)["tokens_per_second"])

        return sum(pool.map(one, prompts))

    def upstream(self, client: bulkhead.Client, model: str) -> None:
        """Beside the upstream class's own way to generate, eagerly: of transformers, but of
        chatterbox-tts for T3."""
        rate = self.rate(client, model, count=THEIRS)
        client.unload(model)
        command = [sys.executable, __file__, "--upstream", quantised(model)[0]]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": f"{ROOT}/clients/python:{os.environ.get('PYTHONPATH', '')}"})
        if done.returncode != 0:
            raise Faulty((done.stderr or done.stdout).strip().splitlines()[-1])
        theirs = float(done.stdout.splitlines()[-1])
        self.results.add(model, "graph : upstream eager", rate / theirs, ">= 4", ours=rate, theirs=theirs)

    def cycles(self, client: bulkhead.Client, model: str, pinned: float) -> None:
        rates, shares = [], []
        for _ in range(CYCLES):
            with uploads(client, model) as seen:
                client.load(model)
            if rate := seen():
                shares.append(rate / pinned)
            self.sequence(client, model)
            rates.append(self.rate(client, model, count=64))
            client.unload(model)
        swing = (max(rates) - min(rates)) / statistics.median(rates)
        self.results.add(model, f"swing of tokens/s over {CYCLES} unloads and loads", swing, "<= 0.02", median=statistics.median(rates))
        if shares:
            self.results.add(model, "rate of loading weights / pinned copy", statistics.median(shares), ">= 0.85")
        else:
            self.results.missing(model, "rate of loading weights / pinned copy", "the load told no bytes")

    def succession(self, client: bulkhead.Client, model: str, following: str, pinned: float) -> None:
        """From the death of one model's worker to the first token of another, which
        is not loaded."""
        times = []
        for _ in range(KILLS):
            self.sequence(client, model, count=2)
            pid = next(row["pid"] for row in client.ps() if row["model"] == model)
            prompt = self.prompt(client, following, 16)  # which loads it
            client.unload(following)
            start = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            times.append(self.sequence(client, following, count=2, prompt=prompt)["first_at"] - start)
            client.unload(following)
        copy = self.weight_bytes(following.removesuffix("-eager")) / pinned
        self.results.add(model, "kill to the next first token, less the copy, s", statistics.median(times) - copy, "<= 1.5", whole_s=statistics.median(times),
                         copy_s=copy)  # fmt: skip


@contextlib.contextmanager
def uploads(client: bulkhead.Client, model: str) -> Iterator[Callable[[], float]]:
    """Watches a load's progress: bytes a second of the phase that tells bytes last."""
    events = client.events(model)
    seen: list[tuple[float, int, str]] = []

    def watch() -> None:
        with contextlib.suppress(bulkhead.Error, OSError, ValueError):
            for event in events:
                if event.get("event") == "progress" and event.get("unit") == "bytes":
                    seen.append((event["time"] / 1e3, event["done"], event["phase"]))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def rate() -> float:
        of_last = [one for one in seen if one[2] == seen[-1][2]]
        seconds = of_last[-1][0] - of_last[0][0] if of_last else 0
        return (of_last[-1][1] - of_last[0][1]) / seconds if seconds > 0 else 0

    yield rate
    events.close()


def quantised(model: str) -> tuple[str, str]:
    """The model's name in models.py, and its weights' form; the latter is empty where they
    are of --dtype."""
    name, _, weights = model.rpartition("_")
    return (name, weights) if weights in QUANTISED else (model, "")


def buckets(model: str) -> list[int]:
    return BUCKETS[quantised(model)[0]]


def stepped(told: dict[str, Any]) -> int:
    return sum(bucket["steps"] for bucket in told["buckets"])


def bandwidths() -> tuple[dict[str, float], float]:
    """Bytes a second: moved by the GPU within its memory, by what moved them, of which the best
    counts; and copied to it from pinned memory."""
    import torch

    size = 2 << 30
    data = torch.ones(size // 4, device="cuda")  # few enough to be counted in 32 bits
    other = torch.empty_like(data)
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device="cuda")

    def best(work: Callable[[], object], of: int) -> float:
        times = []
        for _ in range(10):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return of / min(times)

    reads = {
        "sum": best(lambda: data.sum(), size),
        "max": best(lambda: data.view(torch.int32).max(), size),
        "copy (read and written)": best(lambda: other.copy_(data), 2 * size),
    }
    pinned = best(lambda: target.copy_(host, non_blocking=True), host.numel())
    del data, other, target, host
    torch.cuda.empty_cache()
    return reads, pinned


def device_name() -> str:
    done = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True) if _has("nvidia-smi") else None
    return done.stdout.strip() if done and done.returncode == 0 else "no GPU"


def _has(program: str) -> bool:
    return any((Path(folder) / program).is_file() for folder in os.environ.get("PATH", "").split(":"))


def weights_of(file: Path) -> dict[str, tuple[list[int], int]]:
    """Shape and bytes of each tensor of a safetensors file, of whose form this reads the head."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        head = json.loads(opened.read(size))
    return {name: (one["shape"], one["data_offsets"][1] - one["data_offsets"][0]) for name, one in head.items() if name != "__metadata__"}


def upstream(model: str) -> float:
    """Tokens a second of the upstream class's own greedy generation, in a process of its own: the
    median of several. As ours, of steps alone: what a prompt and the beginning take is in a short
    generation too, which is taken off."""
    import torch
    from bulkhead.export.families import Prompt, family_named

    sys.path.insert(0, str(Path(__file__).parent))
    import models

    made = getattr(models, model)()
    if torch.cuda.is_available():
        made = made.to("cuda", torch.bfloat16)
    if model == "higgs_v2":
        made.config.audio_stream_eos_id = -1  # no code: it goes on
    family = family_named(FAMILIES.get(model, "causal_lm"))(made)
    prompt = family.prompts()[0]
    if model not in FAMILIES:
        made.generation_config.eos_token_id = None
        prompt = Prompt(tokens=torch.arange(10, 26)[:, None])

    def timed(asked: int) -> tuple[int, float]:
        start = time.monotonic()
        count = len(family.reference(prompt, asked))
        return count, time.monotonic() - start

    rates = []
    for turn in range(REPEATS + 1):
        (few, short), (count, long) = timed(THEIRS_SHORT), timed(THEIRS)
        if count < THEIRS // 2:
            raise Faulty(f"upstream stopped after {count} of {THEIRS} tokens")
        if turn > 0:
            rates.append((count - few) / (long - short))
    return statistics.median(rates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--out", default=str(ROOT / "tests" / "gpu" / "results"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--packages", help="a folder to keep the packages in; else they are made again")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--upstream", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.upstream:
        print(upstream(options.upstream))
        return 0
    if options.rehearse:
        # The whole way, but each part of it briefly.
        globals().update(REPEATS=2, CYCLES=2, ROUNDS=1, KILLS=1)
    with tempfile.TemporaryDirectory(prefix="bh-") as folder:
        bench = Bench(options, Path(folder))
        bench.models = [model for model in bench.models if bench.export(model)]
        if not bench.models:
            return 1
        bench.program("up", str(bench.fleet()))
        try:
            with bulkhead.connect(bench.socket, name="bench") as client:
                bench.run(client)
        finally:
            bench.program("down")
    print(f"written: {bench.results.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
