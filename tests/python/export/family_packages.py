"""Small packages of each family that no real model can be had of, compiled once and kept beside the
build's models. Each is for one sequence: functions of several are compiled for each family by
tests/gpu_offline/test_generated.py, and for a CPU by make_test_models.py."""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import version
from pathlib import Path

import tiny_models
from bulkhead.export import inductor, make
from bulkhead.export import __file__ as exporter
from bulkhead.export.families import Family, family_named
from bulkhead.export.source import Loaded

NAMES = ("chatterbox_t3", "higgs_audio_v2", "qwen3_vl")
# A chunk is more rows than product_kernel.h has at once, and no multiple of them.
LENGTH, CHUNK = 128, 40


def family(name: str) -> Family:
    model = tiny_models.higgs_audio_v2(codec=True) if name == "higgs_audio_v2" else getattr(tiny_models, name)()
    return family_named(name)(model)


def package(name: str, made: Family, build: Path) -> Path:
    """The folder of its package; compiled again where what makes it has changed since."""
    folder = build / "models" / "test" / "families" / name
    stamp = folder.with_name(f".{name}.stamp")
    wanted = _digest()
    if not (folder / "manifest.json").is_file() or not stamp.is_file() or stamp.read_text() != wanted:
        folder.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        make.make(Loaded(made, name, {"kind": "python"}), folder, device="cpu", kv_dtype="float32", length=LENGTH, slots=1,
                  slots_max=1, buckets=None, chunk=CHUNK, tell=print)  # fmt: skip
        stamp.write_text(wanted)
    return folder


def _digest() -> str:
    digest = hashlib.sha256(os.fsencode(" ".join(inductor.cpu_flags())))
    for one in ("torch", "transformers", "chatterbox-tts"):
        digest.update(version(one).encode())
    files = [Path(__file__), Path(tiny_models.__file__), *sorted(Path(exporter).parent.rglob("*.*[yh]"))]
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
