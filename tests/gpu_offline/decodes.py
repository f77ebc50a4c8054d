"""Each family's decode, compiled for a GPU of sm_90 without one and kept beside the build:
decodes.py BUILD

Into BUILD/gpu_offline/FAMILY/decode.pt2; what is there is kept until what makes it changes. Small
models of one layer: what they are compiled to has the form of a large one's. Exits with 77 where a
tool is missing, which it names.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "python" / "export"), str(ROOT / "clients" / "python")]

import requirements  # noqa: E402

FAMILIES = ("causal_lm", "chatterbox_t3", "higgs_audio_v2", "qwen3_vl")


def file(build: Path, family: str) -> Path:
    return build / "gpu_offline" / family / "decode.pt2"


def stamp() -> str:
    return requirements.stamp(Path(__file__), ROOT / "tests" / "python" / "export" / "tiny_models.py")


def compile_decode(family: str, out: Path) -> None:
    import tiny_models
    import torch
    from bulkhead.export import functions, twins
    from bulkhead.export.families import family_named

    tiny_models.TEXT["num_hidden_layers"] = 1
    model = tiny_models.causal("llama") if family == "causal_lm" else getattr(tiny_models, family)()
    made = family_named(family)(model)
    numbers, step = made.numbers(), made.step().eval()
    with twins.placed(made.model, "cuda"):
        functions.compile_decode(step, numbers, functions.Sizes(128, 1, 40, "cuda", torch.float32), out, 1)


def main() -> int:
    if reason := requirements.missing():
        print(f"Skipped\n{reason}")
        return requirements.SKIPPED
    build = Path(sys.argv[1]).resolve()
    stale = [family for family in FAMILIES if not file(build, family).is_file() or _stamped(build, family) != stamp()]
    if not stale:
        return 0
    from bulkhead.export import absent_gpu, inductor

    absent_gpu.install("sm_90")
    inductor.use_toolkit()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with inductor.scratch_beside(build / "gpu_offline"):
        for family in stale:
            start = time.monotonic()
            out = file(build, family)
            shutil.rmtree(out.parent, ignore_errors=True)
            out.parent.mkdir(parents=True)
            compile_decode(family, out)
            (out.parent / "made-by").write_text(stamp())
            print(f"{family}: {time.monotonic() - start:.1f} s, {out.stat().st_size / 1e6:.2f} MB", flush=True)
    return 0


def _stamped(build: Path, family: str) -> str:
    kept = file(build, family).parent / "made-by"
    return kept.read_text() if kept.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
