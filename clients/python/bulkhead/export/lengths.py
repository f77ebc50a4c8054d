"""Lets a CPU function take every attention length up to the manifest's.

Inductor writes a float32 sum of up to 4,096 numbers in one way, and a longer one in another. For a
dynamic count it goes by the example's, and makes the compiled function refuse the others: step
4,097 of a sequence would fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch._inductor.codegen.cpp import CppKernel


@contextmanager
def any_length() -> Iterator[None]:
    """Writes sums of dynamic length in the first way, for all lengths."""
    before = CppKernel.need_use_acc_helper

    def need_use_acc_helper(self: CppKernel, reduction_type: str, dtype: torch.dtype, use_scalar: bool) -> bool:
        sizes = self.call_ranges[self.reduction_depth :]
        if reduction_type == "sum" and not all(size.is_number for size in sizes):
            return False
        return bool(before(self, reduction_type, dtype, use_scalar))

    with mock.patch.object(CppKernel, "need_use_acc_helper", need_use_acc_helper):
        yield
