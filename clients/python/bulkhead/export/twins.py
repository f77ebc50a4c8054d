"""Weights for an absent GPU: tensors without bytes replace a model's own while its functions are
traced and compiled.

They report the GPU as their device. The model's own tensors stay where they are, and are stored in
the package.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ..errors import Error
from . import absent_gpu

_originals: dict[int, Tensor] = {}  #: of twins, by storage, while a model is `placed`


def placed(model: torch.nn.Module, device: str) -> AbstractContextManager[None]:
    """Puts the model on its device while its functions are made."""
    if device == "cuda" and absent_gpu.installed():
        return _by_twins(model)
    model.to(device)
    return nullcontext()


@contextmanager
def _by_twins(model: torch.nn.Module) -> Iterator[None]:
    held = [(members, name, tensor) for module in model.modules() for members in (module._parameters, module._buffers)
            for name, tensor in members.items() if tensor is not None]  # fmt: skip
    made: dict[int, Tensor] = {}  # tied weights stay tied
    try:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
            for members, name, tensor in held:
                if id(tensor) not in made:
                    made[id(tensor)] = _like(tensor)
                    _originals[absent_gpu.storage(made[id(tensor)])] = tensor
                members[name] = made[id(tensor)]
            yield
    finally:
        for members, name, tensor in held:
            members[name] = tensor
        _originals.clear()


def _like(tensor: Tensor) -> Tensor:
    new = torch.empty_strided(tuple(tensor.size()), tuple(tensor.stride()), dtype=tensor.dtype, device="cuda:0")
    return torch.nn.Parameter(new, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else new


def original(tensor: Tensor, name: str) -> Tensor:
    """Returns the tensor that a program's constant stands for: itself, unless it is a twin.

    Errors: input_invalid for a tensor without bytes that has no counterpart in the model."""
    if not isinstance(tensor, torch._subclasses.FakeTensor):
        return tensor
    found = _originals.get(absent_gpu.storage(tensor))
    if found is None or found.size() != tensor.size() or found.stride() != tensor.stride():
        raise Error("input_invalid", f"compiling for an absent GPU: the constant {name} was made while the model was traced, so its values are unknown",
                    "make it a buffer of its module, or export where the GPU is")  # fmt: skip
    return found


@contextmanager
def compiling(program: ExportedProgram) -> Iterator[None]:
    """Active while Inductor compiles a program. If it holds twins, converts all its tensors to the
    program's fake mode."""
    if not absent_gpu.installed():
        yield
        return
    signature = program.graph_signature
    wanted = set(signature.user_inputs)
    examples = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted]
    mode = next(value.fake_mode for value in examples if isinstance(value, torch._subclasses.FakeTensor))
    with unset_fake_temporarily():
        for tensors in (program._state_dict, program._constants):
            made: dict[Any, Any] = {}
            for name, tensor in tensors.items():
                if isinstance(tensor, torch._subclasses.FakeTensor):
                    key = (absent_gpu.storage(tensor), tensor.size(), tensor.stride(), tensor.storage_offset())
                    if key not in made:
                        with mode:
                            made[key] = _like(tensor)
                        if key[0] in _originals:
                            _originals[absent_gpu.storage(made[key])] = _originals[key[0]]
                    tensors[name] = made[key]
        program._example_inputs = pytree.tree_unflatten(examples, program.call_spec.in_spec)
        with _bytes_of_originals():
            yield


@contextmanager
def _bytes_of_originals() -> Iterator[None]:
    """Returns the original's bytes when Inductor asks for a twin's, to store constants in the
    package."""
    before = torch.UntypedStorage.cpu

    def cpu(storage: Any) -> Any:
        found = _originals.get(storage._cdata)
        return before(storage) if found is None else found.detach().clone(memory_format=torch.preserve_format).untyped_storage()

    with mock.patch.object(torch.UntypedStorage, "cpu", cpu):
        yield


def constants_of(package: Path) -> list[str]:
    """The constants that a compiled function's code needs; the function need not be able to run
    here."""
    with zipfile.ZipFile(package) as opened:
        (code,) = [name for name in opened.namelist() if name.endswith(".wrapper.cpp")]
        return re.findall(r'constants_info_\[\d+\]\.original_fqn = "([^"]+)"', opened.read(code).decode())
