"""Engines in Python at their true size on a GPU: bench.py --build BUILD [--models
NAME,…] [--rehearse]

Weights are random, sizes those of Higgs Audio 2 (28 layers, 3,072 wide, of text and of audio) and
of Qwen3-VL-4B; Higgs Audio's codec and the tokenizers are small. Each line names its baseline,
measured in the same run: upstream's own `generate` on the same GPU, with its growing cache; the
engine in a worker with graphs off; the engine's class called in-process by the same Python.
Requests of the sides alternate. Each load, round and reload is printed as soon as it has ended.
`--rehearse` goes the same way on a CPU with small models, and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / folder) for folder in ("clients/python", "tests/python/engines")]

import bulkhead  # noqa: E402

ROUNDS = 3
RELOADS = 3
LENGTH = 200  #: frames, or tokens
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}  #: of transformers too, read when it is imported
CACHES = [1024, 4096]
SECONDS = 300
ENGINES = {"higgs": ("higgs_audio_v2:HiggsAudio", "speak"), "qwen": ("qwen3_vl:Qwen3VL", "answer")}
ASKED: dict[str, dict[str, Any]] = {
    "higgs": {"text": "Bulkhead keeps each model in a process of its own.", "ras_window": 0},
    "qwen": {"prompt": "What is a bulkhead?"},
}
#: Of the language models, as the models' own configurations have them.
LLAMA_3B = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 128256}  # fmt: skip
QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151936}  # fmt: skip


def make(name: str, folder: Path, small: bool) -> None:
    """A folder that the engine loads: small_models' own, with the large model's weights in the
    place of the small one's."""
    import small_models
    import torch
    import transformers

    (small_models.higgs_audio_v2 if name == "higgs" else small_models.qwen3_vl)(folder)
    if small:
        return
    kind = transformers.HiggsAudioV2ForConditionalGeneration if name == "higgs" else transformers.Qwen3VLForConditionalGeneration
    config = transformers.AutoConfig.from_pretrained(folder)
    for key, value in (LLAMA_3B if name == "higgs" else QWEN3_4B).items():
        setattr(config.get_text_config(), key, value)
    config.dtype = "bfloat16"
    if name == "qwen":
        config.text_config.dtype = "bfloat16"
        config.text_config.rope_parameters = {**config.text_config.rope_parameters, "mrope_section": [24, 20, 20]}
        config.vision_config.out_hidden_size = config.text_config.hidden_size
    else:
        config.pad_token_id = config.get_text_config().pad_token_id
    generation = transformers.GenerationConfig.from_pretrained(folder)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = kind(config).eval()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():  # what would end an answer is never the likeliest
        if name == "higgs":
            head = model.audio_lm_head.weight.view(config.num_codebooks, config.codebook_size, -1)
            head[:, config.audio_stream_eos_id] = 0
        else:
            model.lm_head.weight[generation.eos_token_id] = 0
    model.generation_config = generation
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    model.save_pretrained(folder)


def upstream(name: str, folder: str, device: str) -> Iterator[float]:
    """Seconds of upstream's own `generate` for LENGTH greedy steps, once for each line of
    standard input."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    kind = transformers.HiggsAudioV2ForConditionalGeneration if name == "higgs" else transformers.Qwen3VLForConditionalGeneration
    model = kind.from_pretrained(folder, dtype="auto", device_map=device).eval()
    tokens = torch.arange(3, 100, device=device)[None]
    config = model.generation_config
    config.do_sample, config.max_new_tokens, config.disable_compile = False, LENGTH, True
    config.temperature = config.top_k = config.top_p = None
    if name == "higgs":
        config.ras_win_len = None
    for _ in sys.stdin:
        begun = time.monotonic()
        with torch.no_grad():
            made = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
        made.cpu()
        yield time.monotonic() - begun


class Process:
    """This script, called for one side: a line in, seconds out."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2])})

    def seconds(self, line: str = "{}") -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        told = self.process.stdout.readline()
        if not told:
            raise RuntimeError(f"{self.process.args} ended early")
        return float(told)

    def end(self) -> None:
        self.process.communicate()


def in_worker(client: bulkhead.Client, model: str, method: str, asked: dict[str, Any]) -> tuple[float, float, int]:
    """Seconds to the end, to the first part, and the steps made."""
    begun, first = time.monotonic(), 0.0
    for part in client.stream(model, method=method, parameters=asked, deadline=SECONDS):
        first = first or time.monotonic() - begun
        said = part.values_json
    return time.monotonic() - begun, first, int(said["tokens"])


def measure(client: bulkhead.Client, name: str, folder: Path, device: str) -> None:
    engine, method = ENGINES[name]
    asked = {**ASKED[name], "do_sample": False, "max_new_tokens": LENGTH}
    options = {"model": str(folder), "cache_lengths": CACHES}
    for model in (name, f"{name}-eager"):
        begun = time.monotonic()
        client.load(model, deadline=SECONDS)
        print(f"{model}: loaded in {time.monotonic() - begun:.1f} s")
        in_worker(client, model, method, asked)
    local = Process(sys.executable, str(ROOT / "tests/bench/peers/engine_in_process.py"), f"bulkhead.engines.{engine}", json.dumps(options), device)
    theirs = Process(sys.executable, __file__, "--upstream", f"{name}:{folder}:{device}")
    line = json.dumps({"method": method, "parameters": asked})
    local.seconds(line), theirs.seconds()
    taken: dict[str, list[float]] = {side: [] for side in ("graphs", "eager", "in-process", "upstream")}
    firsts, counts = [], set()
    for turn in range(1, ROUNDS + 1):
        seconds, first, count = in_worker(client, name, method, asked)
        taken["graphs"].append(seconds)
        firsts.append(first)
        counts.add(count)
        seconds, _, count = in_worker(client, f"{name}-eager", method, asked)
        taken["eager"].append(seconds)
        counts.add(count)
        taken["in-process"].append(local.seconds(line))
        taken["upstream"].append(theirs.seconds())
        print(f"  round {turn} of {ROUNDS}: {', '.join(f'{side} {seconds[-1]:.3f} s' for side, seconds in taken.items())}")
    local.end(), theirs.end()
    print(f"{name}: {sorted(counts)} steps of a request")
    if counts != {LENGTH}:
        print(f"  a side made other than {LENGTH} steps: its figures are per request, not per step")
    rates = {side: LENGTH / statistics.median(seconds) for side, seconds in taken.items()}
    for side, rate in rates.items():
        print(f"  {side:<12} {rate:8.1f} steps/s, median of {ROUNDS}; {min(taken[side]):.3f} to {max(taken[side]):.3f} s a request")
    print(f"  first part after {1000 * statistics.median(firsts):.0f} ms")
    for side in ("upstream", "eager", "in-process"):
        print(f"  worker with graphs : {side:<12} {rates['graphs'] / rates[side]:.3f}{'   goal 0.98' if side == 'in-process' else ''}")
    row = next(row for row in client.ps() if row["model"] == name)
    print(f"  graphs: {json.dumps(row['graphs'])}")
    client.unload(f"{name}-eager")
    reloads(client, name, method, asked)


def reloads(client: bulkhead.Client, name: str, method: str, asked: dict[str, Any]) -> None:
    rates, receipts, loads = [], [], []
    for turn in range(1, RELOADS + 1):
        begun = time.monotonic()
        receipt = client.unload(name)[0]
        receipts.append((time.monotonic() - begun, receipt))
        begun = time.monotonic()
        client.load(name, deadline=SECONDS)
        loads.append(time.monotonic() - begun)
        in_worker(client, name, method, asked)
        rates.append(LENGTH / min(in_worker(client, name, method, asked)[0] for _ in range(2)))
        print(f"  reload {turn} of {RELOADS}: receipt after {1000 * receipts[-1][0]:.0f} ms, load {loads[-1]:.2f} s, "
              f"{rates[-1]:.1f} steps/s")  # fmt: skip
    swing = (max(rates) - min(rates)) / statistics.median(rates)
    print(f"  {RELOADS} reloads: {min(rates):.1f} to {max(rates):.1f} steps/s, swing {100 * swing:.2f} %   goal 2 %")
    verified = sum(receipt["verified"] for _, receipt in receipts)
    freed = statistics.median(receipt["gpu_bytes"] or 0 for _, receipt in receipts)
    print(f"  unload until the receipt: median {1000 * statistics.median(seconds for seconds, _ in receipts):.0f} ms, {verified} of {RELOADS} verified, "
          f"{freed / 2**30:.2f} GiB of the GPU back; load: median {statistics.median(loads):.2f} s")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--models", default=",".join(ENGINES))
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--upstream", help=argparse.SUPPRESS)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(QUIET)
    if options.rehearse or os.environ.get("BULKHEAD_REHEARSE"):
        os.environ["BULKHEAD_REHEARSE"] = "1"
        globals().update(ROUNDS=1, RELOADS=1, LENGTH=60)
    if options.upstream:
        for seconds in upstream(*options.upstream.split(":", 2)):
            print(seconds, flush=True)
        return 0
    if options.make:
        name, folder = options.make.split(":", 1)
        make(name, Path(folder), options.rehearse)
        return 0
    device = "cpu" if options.rehearse else "cuda:0"
    names = options.models.split(",")
    with tempfile.TemporaryDirectory(prefix="bh-engines-") as scratch:
        models: dict[str, Any] = {}
        for name in names:
            folder = Path(scratch, name)
            begun = time.monotonic()
            subprocess.run([sys.executable, __file__, "--make", f"{name}:{folder}", *(["--rehearse"] if options.rehearse else [])], check=True)
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            print(f"{name}: {size / 2**30:.2f} GiB of weights made in {time.monotonic() - begun:.0f} s")
            common = {"runtime": "python", "interpreter": sys.executable, "engine": f"bulkhead.engines.{ENGINES[name][0]}", "device": device,
                      "options": {"model": str(folder), "cache_lengths": CACHES}, "environment": QUIET,
                      "deadlines": {"load": "5m", "request": "5m"}}  # fmt: skip
            models[name] = {**common, "graphs": "preferred" if options.rehearse else "required"}
            models[f"{name}-eager"] = {**common, "graphs": "off"}
        fleet = Path(scratch, "fleet.json")
        fleet.write_text(json.dumps({"version": 1, "models": models}))
        os.environ["BULKHEAD_SOCKET"] = f"{scratch}/run/control.sock"
        program = str(Path(options.build) / "bin" / "bulkhead")
        subprocess.run([program, "up", str(fleet)], check=True, stdout=subprocess.DEVNULL)
        failed = 0
        try:
            with bulkhead.connect(name="bench") as client:
                for name in names:
                    try:
                        measure(client, name, Path(scratch, name), device)
                    except Exception as wrong:  # the other model is measured nevertheless
                        failed = 1
                        print(f"{name}: not measured: {type(wrong).__name__}: {wrong}")
                        print(client.why(name))
        finally:
            subprocess.run([program, "down"], check=True, stdout=subprocess.DEVNULL)
    return failed


if __name__ == "__main__":
    sys.exit(main())
