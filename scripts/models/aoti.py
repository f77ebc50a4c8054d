"""Exports a module as an AOTInductor package that bulkhead-worker can load.

Settings are those of `bulkhead.export`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

CLIENT = Path(__file__).resolve().parents[2] / "clients" / "python"
sys.path.insert(0, str(CLIENT))

from bulkhead.export import inductor  # noqa: E402
from bulkhead.export.inductor import scratch_beside  # noqa: E402

if TYPE_CHECKING:  # slow to import, and not needed to see that a package is current
    import torch

__all__ = ["SETTINGS", "cpu_flags", "export_package", "export_sources", "scratch_beside"]

#: What every package is compiled under and says of itself, for a stamp.
SETTINGS = CLIENT / "bulkhead" / "export" / "inductor.py"


def cpu_flags() -> str:
    return " ".join(inductor.cpu_flags())


def export_sources() -> bytes:
    """Of what decides how a language model's package comes out, for a stamp."""
    export = CLIENT / "bulkhead" / "export"
    names = ("families/__init__", "families/causal_lm", "functions", "inductor", "lengths", "make", "manifest", "materialized", "product_kernel", "products", "rewriting", "side_by_side", "source", "step", "weights")
    return b"".join((export / f"{name}.py").read_bytes() for name in names) + (export / "product_kernel.h").read_bytes()


def export_package(module: torch.nn.Module, arguments: tuple, file: Path, dynamic_shapes=None) -> None:
    """Writes `file` whole or not at all."""
    import torch

    partial = file.with_suffix(".partial.pt2")
    with torch.no_grad():
        program = torch.export.export(module.eval(), arguments, dynamic_shapes=dynamic_shapes)
        inductor.compile_package(program, partial)
    os.replace(partial, file)
