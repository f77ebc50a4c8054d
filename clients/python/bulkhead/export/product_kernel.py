"""Adds our own kernel for float32 products on a CPU, product_kernel.h, to Inductor's code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir, lowering
from torch._inductor.codegen import cpp
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel

_KERNEL = (Path(__file__).parent / "product_kernel.h").read_text()

_library = torch.library.Library("bulkhead", "FRAGMENT")


def product(kind: str, members: tuple[str, ...], plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Defines the operator (x, *members): x float32 [rows, in] times a transposed matrix [out, in]
    gives [rows, out]. The struct `kind` of product_kernel.h defines the matrix's members. A
    compiled function uses the kernel, other code `plain`."""
    name = f"product_{kind.lower()}"
    _library.define(f"{name}({', '.join(f'Tensor {one}' for one in ('x', *members))}) -> Tensor")
    _library.impl(name, plain, "CompositeExplicitAutograd")
    _library.impl(name, lambda x, *matrix: x.new_empty(x.shape[0], matrix[0].shape[0]), "Meta")
    operator = getattr(torch.ops.bulkhead, name).default

    class Product(CppTemplate):
        def render(self, kernel: CppTemplateKernel, template_buffer_node: Any = None, epilogue_nodes: Any = None, **unused: Any) -> str:
            assert not epilogue_nodes, "compiled with epilogue_fusion"
            x, *matrix = self.input_nodes
            y = self.output_node if template_buffer_node is None else template_buffer_node
            definition = kernel.def_kernel(inputs={"x": x, **dict(zip(members, matrix, strict=True))}, outputs={"y": y})
            sizes = ", ".join((kernel.size(y, 0), kernel.size(y, 1), kernel.size(x, 1)))
            call = f"bulkhead_product::product(x, bulkhead_product::{kind}{{{', '.join(members)}}}, y, {sizes});"
            return f'{self.header().getvalue()}\n{_KERNEL}\nextern "C" {cpp.get_export_declaration()}\n{definition}\n{{\n    {call}\n}}\n'

    @lowering.register_lowering(operator, type_promotion_kind=None)
    def lower(x: lowering.TensorBox, *matrix: lowering.TensorBox) -> lowering.TensorBox:
        inputs = [_whole(one) for one in (x, *matrix)]
        for i, one in enumerate(inputs):  # the kernel's arguments need different names
            if any(one.get_name() == other.get_name() for other in inputs[:i]):
                inputs[i] = ir.ExternKernel.copy_input(one)
        layout = ir.FixedLayout(x.get_device(), x.get_dtype(), [x.get_size()[0], matrix[0].get_size()[0]])
        return Product(name, inputs, layout, 1).generate().output_node()

    called: Callable[..., Tensor] = operator
    return called


def _whole(x: lowering.TensorBox) -> Any:
    """Puts x into a contiguous buffer that starts with it: the kernel gets the buffer's address."""
    found = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))
    return found if found.get_layout().offset == 0 else ir.ExternKernel.copy_input(found)
