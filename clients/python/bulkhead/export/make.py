"""Makes a package folder of a loaded model."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import Error
from . import functions, inductor, manifest, side_by_side, target, twins, weights
from .digest import sha256
from .families import Method, Numbers, PromptForm
from .functions import Sizes
from .side_by_side import Constants, Task
from .source import Loaded
from .step import Step

Tell = Callable[[str], None]

LENGTH_MIN = 64  #: both exceed the sizes of `functions.example_of` for a CPU
CHUNK_MIN = 8
BUCKETS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PACKAGED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make(loaded: Loaded, out: Path, *, device: str, kv_dtype: str, length: int | None, slots: int, slots_max: int,
         buckets: list[int] | None, chunk: int, tell: Tell) -> None:  # fmt: skip
    """Writes the package to `out`, completely or not at all; replaces an existing package.

    Errors: input_invalid for sizes that the model or each other forbid, and for an `out` that
    `target` refuses."""
    target.check(out)
    family = loaded.family
    numbers = family.numbers()
    length_max = numbers.length_max if length is None else length
    check_sizes(length_max, slots, slots_max, buckets, chunk, numbers.length_max)
    sizes = Sizes(length_max, slots_max, min(chunk, length_max), device, PACKAGED_DTYPES[kv_dtype])
    form = family.prompt_form()
    if device == "cpu" and form.input == "tokens":
        # Saves a step, which on a CPU costs nearly as much as a short prompt.
        form = replace(form, logits=True)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with twins.placed(family.model, device), inductor.scratch_beside(partial):
            step = family.step().eval()
            methods = family.methods()
            tasks = _tasks(step, numbers, form, sizes, methods, partial)
            modules = [step, *(method.module for method in methods)]
            names = ", ".join(task.name for task in tasks)
            with _timed(tell, f"compiling {names}, for 1 to {slots_max} sequences and 2 to {sizes.chunk_max} positions"):
                constants = _compiled(tasks, modules, device, lambda name, seconds: tell(f"  {name}: {seconds:.1f} s"))
        with _timed(tell, "writing the weights"):
            stored, renamed = weights.save(constants, partial / "weights.safetensors")
        dtype = str(next(step.parameters()).dtype).removeprefix("torch.")
        manifest.write(partial, {
            "format": manifest.FORMAT, "family": family.name, "name": loaded.name, "exporter": __version__, "torch": str(torch.__version__),
            "device": device, "compute_capability": _capability(device), "cpu_flags": inductor.cpu_flags(),
            "dtypes": {"weights": dtype, "kv": kv_dtype},
            "vocabulary": numbers.vocabulary, "codebooks": numbers.codebooks, "rows": numbers.rows,
            "length_max": length_max, "length": min(length_max, 2048), "slots": slots, "slots_max": slots_max,
            "buckets": sorted({*(buckets or [one for one in BUCKETS if one < length_max]), length_max}),
            "kv": {"layers": numbers.layers, "heads": numbers.heads, "dim": numbers.dim},
            "prefill": {
                "file": "prefill.pt2", "input": form.input, "chunk_max": sizes.chunk_max, "logits": form.logits,
                **({"width": form.width} if form.input == "embeddings" else {}),
                **({} if form.ids is None else {"ids": list(form.ids)}),
                "extras": [{"name": one.name, "dtype": one.dtype, "shape": list(one.shape)} for one in form.extras],
            },
            "decode": [{"file": "decode.pt2", "sequences": [1, 1]}, *([{"file": "decode_batch.pt2", "sequences": [2, slots_max]}] if slots_max > 1 else [])],
            "rope_delta": step.rope_delta or False, "first_token": None if numbers.first_token is None else list(numbers.first_token),
            "stop": list(numbers.stop), "bos": numbers.bos, "delay_pattern": numbers.delay_pattern, "sampling": family.sampling(), "sampling_order": numbers.sampling_order,
            "methods": [{"name": one.name, "file": f"{one.name}.pt2", "inputs": one.inputs, "outputs": one.outputs} for one in methods], "functions": {name: sha256(partial / name) for name in constants}, "weights": stored, "constants": renamed, "tokenizer": _tokenizer_files(family.tokenizer, partial), "source": loaded.origin,
        })  # fmt: skip
        target.check(out)  # again: minutes have passed
        target.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tasks(step: Step, numbers: Numbers, form: PromptForm, sizes: Sizes, methods: Sequence[Method], folder: Path) -> list[Task]:
    """The functions to compile, the slowest first."""

    def task(name: str, compile: Callable[..., Constants], *arguments: Any) -> Task:
        return Task(name, lambda: compile(*arguments))

    return [
        *([task("decode_batch.pt2", functions.compile_decode, step, numbers, sizes, folder / "decode_batch.pt2", sizes.slots_max)] if sizes.slots_max > 1 else []),
        task("prefill.pt2", functions.compile_prefill, step, numbers, form, sizes, folder / "prefill.pt2"),
        task("decode.pt2", functions.compile_decode, step, numbers, sizes, folder / "decode.pt2", 1),
        *(task(f"{one.name}.pt2", functions.compile_method, one, sizes.device, folder / f"{one.name}.pt2") for one in methods),
    ]


def _compiled(tasks: list[Task], modules: list[torch.nn.Module], device: str, finished: Callable[[str, float], None]) -> dict[str, Constants]:
    """The constants of each function, by file."""
    if device == "cpu":
        return side_by_side.compiled(tasks, modules, finished)
    constants: dict[str, Constants] = {}
    # In this process: CUDA does not work in a fork, and kernels must be measured alone.
    for task in tasks:
        start = time.monotonic()
        constants[task.name] = task.compile()
        finished(task.name, time.monotonic() - start)
    return constants


def check_sizes(length: int | None, slots: int, slots_max: int, buckets: list[int] | None, chunk: int, model_max: int | None = None) -> None:
    """Checks sizes as far as known before the model is loaded: `model_max` is None then, and so is
    a `length` that the model decides.

    Errors: input_invalid."""

    def need(good: bool, attempt: str, remedy: str) -> None:
        if not good:
            raise Error("input_invalid", f"exporting with {attempt}", remedy)

    if length is not None:
        need(LENGTH_MIN <= length, f"--length {length}", f"give {LENGTH_MIN} positions, or more")
        need(model_max is None or length <= model_max, f"--length {length}", f"this model takes {LENGTH_MIN} to {model_max} positions")
    need(1 <= slots_max <= 64, f"--slots-max {slots_max}", "1 to 64 sequences can share a buffer")
    need(1 <= slots <= slots_max, f"--slots {slots}", f"give 1 to --slots-max, {slots_max}")
    need(chunk >= CHUNK_MIN, f"--chunk {chunk}", f"it is compiled for up to {CHUNK_MIN} positions at a time, or more")
    for one in buckets or []:
        need(2 <= one and (length is None or one <= length), f"a bucket of {one}", f"buckets are attention lengths of 2 to {length or '--length'}")


def _tokenizer_files(tokenizer: Any, folder: Path) -> list[str]:
    if tokenizer is None:
        return []
    before = set(folder.iterdir())
    tokenizer.save_pretrained(folder)
    return sorted(path.name for path in set(folder.iterdir()) - before if path.is_file())


def _capability(device: str) -> str | None:
    if device != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


@contextmanager
def _timed(tell: Tell, what: str) -> Iterator[None]:
    tell(f"{what} …")
    start = time.monotonic()
    yield
    tell(f"  {time.monotonic() - start:.1f} s")
