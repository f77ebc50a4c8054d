"""python -m bulkhead.export SOURCE FOLDER: makes a package of a model.
python -m bulkhead.export --check FOLDER: is it whole?"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Error
from . import manifest
from .families import FAMILIES

if TYPE_CHECKING:
    from .source import Loaded

DTYPES = ("float32", "bfloat16", "float16")


def main() -> int:
    arguments = _parser().parse_args()
    try:
        if arguments.check is not None:
            return _check_whole(arguments.check)
        if arguments.source is None or arguments.folder is None:
            raise Error("input_invalid", "exporting without a source and a folder", "bulkhead.export SOURCE FOLDER; --help says more")
        _needs("torch", "transformers", "safetensors")
        return _export(arguments)
    except Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bulkhead.export", description="Makes a package for bulkhead's `generate` runtime.")
    parser.add_argument("source", nargs="?", help="a Hugging Face folder, a .gguf file, or FILE.py:FUNCTION that returns the module")
    parser.add_argument("folder", nargs="?", type=Path, help="where the package goes: a new or an empty folder, or a package, which is replaced when the new one is complete")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="only compare a package's files with its manifest")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--target", metavar="sm_90", help="compile for a GPU of this kind on a machine without one: --device cuda, with kernels that nothing was timed for, and no comparison")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of weights and computation")
    parser.add_argument("--kv-dtype", choices=DTYPES, help="type of keys and values (default: that of --dtype)")
    parser.add_argument("--weights", choices=("int8", "int4"), help="weights of linear layers in 8 bits, or in 4 and the head in 8; the rest as --dtype")
    parser.add_argument("--length", type=int, help="the longest sequence (default: what the model allows)")
    parser.add_argument("--slots", type=int, default=4, help="sequences side by side, where the fleet file says nothing else")
    parser.add_argument("--slots-max", type=int, default=8, help="the most slots that a fleet file may ask for")
    parser.add_argument("--buckets", type=_numbers, help="attention lengths to capture on a GPU: 256,1024,2048")
    parser.add_argument("--chunk", type=int, default=512, help="prompt positions of one prefill call, at most")
    parser.add_argument("--family", choices=sorted(FAMILIES), help="default: by the source's model_type")
    parser.add_argument("--name", help="default: the name that the source has")
    parser.add_argument("--tokens", type=int, help="tokens per prompt that are generated at the end and compared with the original; 0: none (default: 16; none with --target)")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _needs(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise Error("input_invalid", f"exporting without {' and '.join(missing)}", f"pip install {' '.join(missing)}, in the versions of scripts/requirements.txt")


def _export(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # load the model only from the folder
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, about itself
    # It warns that there is no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    import torch
    import transformers

    from . import absent_gpu, inductor, make, quantised, source, target

    tokens = (0 if arguments.target else 16) if arguments.tokens is None else arguments.tokens
    if tokens < 0:
        raise Error("input_invalid", f"exporting with --tokens {tokens}", "give how many are generated and compared; 0: none")
    if tokens > 0 and arguments.target:
        raise Error("input_invalid", f"exporting with --target {arguments.target} and --tokens {tokens}", "leave --tokens out: what is compiled for another machine does not run here")
    make.check_sizes(arguments.length, arguments.slots, arguments.slots_max, arguments.buckets, arguments.chunk)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = "cuda" if arguments.target else arguments.device
    if arguments.target:
        absent_gpu.install(arguments.target)
    if device == "cuda":
        if not torch.cuda.is_available():
            raise Error("input_invalid", "exporting for a GPU where PyTorch sees none", "run it on the GPU's machine, where kernels are tuned for the GPU at hand, or say --target sm_90")
        inductor.use_toolkit()
    folder = arguments.folder.resolve()
    target.check(folder, arguments.source)
    start = time.monotonic()
    _tell(f"loading {arguments.source} …")
    # In parallel: other processes do most of the work.
    vectors = threading.Thread(target=inductor.pick_vectors, daemon=True)
    vectors.start()
    loaded = source.load(arguments.source, getattr(torch, arguments.dtype), arguments.family, arguments.name)
    vectors.join()
    _tell(f"  {loaded.name}, family {loaded.family.name}")
    if arguments.weights is not None:
        loaded.origin["weights"] = arguments.weights
        numbers = loaded.family.numbers()
        counts = quantised.quantise(loaded.family.model, loaded.family.step(), arguments.weights, numbers.vocabulary * numbers.codebooks)
        made = " and ".join(f"{count} to {kind}" for kind, count in counts.items())
        _tell(f"  linear layers: {made}; what follows is compared with the model so rounded")
    make.make(loaded, folder, device=device, kv_dtype=arguments.kv_dtype or arguments.dtype, length=arguments.length,
              slots=arguments.slots, slots_max=arguments.slots_max, buckets=arguments.buckets, chunk=arguments.chunk, tell=_tell)  # fmt: skip
    good = tokens == 0 or _compare(loaded, folder, tokens)
    size = sum(path.stat().st_size for path in folder.iterdir())
    _tell(f"{folder.name}: {size / 1e6:.1f} MB in {time.monotonic() - start:.1f} s")
    return 0 if good else 1


def _compare(loaded: Loaded, folder: Path, count: int) -> bool:
    from . import check

    package = check.Package(folder)
    exact = package.manifest["dtypes"] == {"weights": "float32", "kv": "float32"}
    tolerance = check.NEAR_TIE if exact else check.NEAR_TIE_16
    good = True
    for prompt in loaded.family.prompts():
        verdict = check.compare(package, loaded.family, prompt, count)
        good = good and verdict.good(tolerance)
        tie = f", then {verdict.gap:.3g} between the two choices" if verdict.equal < verdict.count else ""
        _tell(f"check: {verdict.equal} of {verdict.count} greedy tokens equal the original's{tie}")
    if not good:
        print("error: the package does not generate what the model does; it was written nevertheless", file=sys.stderr)
    return good


def _check_whole(folder: Path) -> int:
    from . import digest

    said = manifest.read(folder)
    for file, wanted in {**said.get("functions", {}), said["weights"]["file"]: said["weights"]["sha256"]}.items():
        if (found := digest.sha256(folder / file)) != wanted:
            raise Error("input_invalid", f"checking {folder}: the SHA-256 of {file} is {found}, not {wanted}", "copy the package again, or export the model again")
    whole = "whole" if "functions" in said else "whole; of its functions the manifest of an earlier exporter says no hash"
    print(f"{folder}: {said['name']}, {said['weights']['bytes']} bytes of weights, {whole}")
    return 0


def _tell(words: str) -> None:
    print(words, flush=True)


if __name__ == "__main__":
    sys.exit(main())
