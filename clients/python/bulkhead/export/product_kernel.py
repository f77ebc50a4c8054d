"""Products of float32 matrices on a CPU, as a kernel of our own in what Inductor writes."""

from __future__ import annotations

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
_library.define("product(Tensor x, Tensor weight) -> Tensor")
_library.impl("product", lambda x, weight: torch.nn.functional.linear(x, weight), "CompositeExplicitAutograd")
_library.impl("product", lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]), "Meta")


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] and weight [out, in], float32 on a CPU, to [rows, out]: in a compiled function by product_kernel.h."""
    done: Tensor = torch.ops.bulkhead.product(x, weight)
    return done


class _Product(CppTemplate):
    def render(self, kernel: CppTemplateKernel, template_buffer_node: Any = None, epilogue_nodes: Any = None, **unused: Any) -> str:
        assert not epilogue_nodes, "compiled with epilogue_fusion"
        x, weight = self.input_nodes
        y = self.output_node if template_buffer_node is None else template_buffer_node
        definition = kernel.def_kernel(inputs={"x": x, "weight": weight}, outputs={"y": y})
        sizes = ", ".join((kernel.size(y, 0), kernel.size(y, 1), kernel.size(weight, 1)))
        return f'{self.header().getvalue()}\n{_KERNEL}\nextern "C" {cpp.get_export_declaration()}\n{definition}\n{{\n    bulkhead_product::product(x, weight, y, {sizes});\n}}\n'


def _whole(x: lowering.TensorBox) -> Any:
    """x in a buffer, contiguous from its begin on: the kernel gets the buffer's address."""
    found = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))
    return found if found.get_layout().offset == 0 else ir.ExternKernel.copy_input(found)


@lowering.register_lowering(torch.ops.bulkhead.product.default, type_promotion_kind=None)
def _lower(x: lowering.TensorBox, weight: lowering.TensorBox) -> lowering.TensorBox:
    inputs = [_whole(x), _whole(weight)]
    if inputs[0].get_name() == inputs[1].get_name():  # the kernel's arguments are told apart by name
        inputs[1] = ir.ExternKernel.copy_input(inputs[1])
    layout = ir.FixedLayout(x.get_device(), x.get_dtype(), [x.get_size()[0], weight.get_size()[0]])
    return _Product("product", inputs, layout, 1).generate().output_node()
