"""The two modes that watch a run: every tensor operator, and Python functions that
reach no operator."""

from __future__ import annotations

import contextlib
import copy
import sys
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import Error
from . import fake_cuda, numbers, values
from .source import Place, here
from .watch import DRAWN, INTERNAL, PINNED, READ, Concatenation, CustomOperator, Kernel, Origin, Watch, joined, stand_in

#: Operators whose CUDA kernels read values although a fake tensor shows nothing, from PyTorch's
# sources (aten/src/ATen/native) and the documentation of torch.linalg 2.11.
_READING_KERNELS = frozenset((
    "_linalg_check_errors",  # of `torch.linalg.inv` and its like: asks whether any code is not zero
    "_linalg_svd", "_linalg_eigh",  # the same, within: BatchLinearAlgebra.cpp
    # Computed on the host, or asked for convergence: BatchLinearAlgebra.cpp.
    "linalg_eig", "_linalg_eigvals",
    "linalg_matrix_exp",  # the norm decides the degree on the host: LinearAlgebra.cpp, mexp_impl
))  # fmt: skip
_INDEX_PUTS = ("index_put", "index_put_", "_index_put_impl_")
#: Operators that copy a CPU tensor without dimensions to the GPU, where others take it as a number:
#: TensorCompare.cpp, where_self_out, and TensorAdvancedIndexing.cpp.
_COPYING = ("where", *_INDEX_PUTS)
_LIST_ELEMENTS_MAX = 1 << 24  #: of a list that stands in for unknown values
_STAND_IN_ROWS = 2  #: of a result whose number of rows is unknown
_TEXTS = frozenset(("__repr__", "__format__", "__str__"))


class Functions(TorchFunctionMode):  # type: ignore[misc]
    """Functions that reach no operator, or that a fake tensor refuses."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        with self._watch.function(name, first.device if first is not None and name == "new_tensor" else kwargs.get("device")):
            if isinstance(generator := kwargs.get("generator"), fake_cuda.CudaGenerator):
                if not generator.is_registered:
                    self._watch.refuse(DRAWN, name)
                kwargs = {**kwargs, "generator": None}
            if first is not None and name in _TEXTS:
                return self._text(first, name, args)
            if first is not None and name in ("numpy", "__array__"):
                return self._array(first, args)
            if name == "pin_memory" and first is not None:
                self._watch.refuse(PINNED)
                first._doctor_pinned = True
                return first
            if name == "is_pinned" and first is not None:
                return is_pinned(first)
            if name == "__reduce_ex__" and first is not None:
                return self._pickled(first, args[1])
            if name == "tensor_split" and first is not None and first.device.type == "cuda":
                args, kwargs = self._split(args, kwargs)
            if name == "__deepcopy__" and first is not None:
                return args[1].setdefault(id(first), first.clone())
            if name in ("data_ptr", "__dlpack__") and first is not None:
                if self._watch.step:
                    raise CustomOperator(
                        f"Tensor.{name}() at {here() or self._watch.target}: a fake tensor has no memory, so what is done "
                        "there is not known"
                    )
                return id(first)
            if kwargs.pop("pin_memory", False):
                self._watch.refuse(PINNED)
                result = function(*args, **kwargs)
                result._doctor_pinned = True
                return result
            # How safetensors maps a file.
            if name == "asarray" and args and isinstance(args[0], torch.UntypedStorage):
                with no_dispatch():
                    return function(*args, **kwargs)
            if (
                name in ("tensor", "as_tensor", "asarray")
                and args
                and isinstance(args[0], (list, tuple))
                and _has_tensor(args[0])
            ):
                args = (tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, args[0]), *args[1:])
            if name == "scaled_dot_product_attention":
                with sdpa_kernel(SDPBackend.MATH):  # the others ask the driver
                    return function(*args, **kwargs)
            if name in ("stft", "istft") and len(args) > 0:
                args, kwargs = self._same_device(name, args, kwargs)
            return function(*args, **kwargs)

    def _same_device(self, name: str, args: Any, kwargs: Any) -> Any:
        window = kwargs.get("window")
        if isinstance(window, torch.Tensor) and window.device != args[0].device:
            self._watch.met(window if window.device.type == "cpu" else args[0], name, is_number=False)
            outside = getattr(torch.overrides, "_no_torch_function_mode", contextlib.nullcontext)
            with outside():
                kwargs = {**kwargs, "window": torch.empty_like(window, device=args[0].device)}
        return args, kwargs

    def _text(self, tensor: Any, name: str, args: Any) -> str:
        if tensor.device.type == "cuda":
            self._watch.read()
        value = values.known(tensor)
        if name == "__format__" and tensor.dim() == 0:
            item = values.ask(lambda one: one.item(), value) if value is not None else stand_in(tensor.dtype)
            return format(item, args[1])
        return f"tensor(…, size={tuple(tensor.shape)})"

    def _pickled(self, tensor: Any, protocol: int) -> Any:
        """What `pickle` and `torch.save` take of a tensor: its values, or a zero
        for all of them."""
        if _is_copied_shallowly():
            return torch.ops.aten.alias.default, (tensor,)
        if tensor.device.type == "cuda":
            self._watch.read()
        value = values.known(tensor)
        with no_dispatch():
            real = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) if value is None else value
            return torch.Tensor.__reduce_ex__(real, protocol)

    def _split(self, args: Any, kwargs: Any) -> Any:
        """Of `tensor_split` by a tensor, which lies on the CPU: by its values."""
        rest = dict(kwargs)
        at = args[1] if len(args) > 1 else rest.pop("tensor_indices_or_sections", None)
        if not isinstance(at, torch.Tensor) or at.device.type != "cpu":
            return args, kwargs
        if _read_before(at) is None:  # of others the finding is the read
            self._watch.met(at, "tensor_split", is_number=True)
        return (args[0], self._list(at), *args[2:]), rest

    def _array(self, tensor: Any, args: Any) -> Any:
        if tensor.device.type == "cuda":
            self._watch.read()
        value, array = values.known(tensor), values.array(tensor)
        if _is_of_gpu(tensor):
            self._watch.not_taken(array, value is not None and not values.is_assumed(tensor), _read_before(tensor))
        return array.astype(args[1], copy=False) if len(args) > 1 and args[1] is not None else array

    def whole_lists(self) -> Any:
        """While entered, `tolist` reads all values at once: a fake tensor's own reads each."""
        return mock.patch.object(fake_tensor.FakeTensor, "tolist", lambda tensor: self._list(tensor))

    def _list(self, tensor: Any) -> Any:
        if tensor.device.type == "cuda":
            self._watch.read()
        value, assumed = values.known(tensor), values.is_assumed(tensor)
        if value is not None and (not assumed or not value.numel()):
            read = values.ask(lambda one: one.tolist(), value)
            if tensor.device.type == "cuda":
                # The user may change it.
                read = copy.deepcopy(self._watch.answer(read, tensor.dtype, True))
        else:
            item = self._watch.answer(
                None if value is None else values.ask(lambda one: one.flatten()[0].item(), value), tensor.dtype, True, assumed
            )
            if tensor.numel() > _LIST_ELEMENTS_MAX:
                raise Error("input_invalid", f"{here() or self._watch.target} reads {tensor.numel()} values into Python, of "
                                             f"which the doctor makes at most {_LIST_ELEMENTS_MAX}",
                            "keep them a tensor; or give smaller inputs")  # fmt: skip
            with no_dispatch():
                read = torch.full(tuple(tensor.shape), item, dtype=tensor.dtype).tolist()
        if _is_of_gpu(tensor):
            self._watch.not_taken(read, value is not None and not assumed, _read_before(tensor))
        return read


class Operators(TorchDispatchMode):  # type: ignore[misc]
    """Sees every operator before the fake tensors do."""

    supports_higher_order_operators = True

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(function, torch._ops.HigherOrderOperator):
            raise CustomOperator(
                f"{function.name()} at {here() or self._watch.target}: an operator that takes functions, which are not looked at"
            )
        namespace, name = function.namespace, function._schema.name.split("::")[1]
        if namespace == "prim":
            return function(*args, **kwargs)
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), composite):
            # It is reached whole in inference mode. Its own kernel runs: a decomposition in Python
            # leaves out what the kernel asks.
            with self:
                return function._op_dk(composite, *args, **kwargs)
        watch = self._watch
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        watch.used.update(id(tensor) for tensor in tensors)
        if name == "lift_fresh":
            return self._lift(function, args[0])
        if name in ("_local_scalar_dense", "equal", "allclose", "is_nonzero"):
            return self._read(function, name, args, kwargs, devices)
        if name == "is_pinned":
            return is_pinned(args[0])
        if name in ("_pin_memory", "pin_memory"):
            args[0]._doctor_pinned = True
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if "cuda" in devices and _kernel_reads(name, function, args, kwargs):
            watch.read()
        target = kwargs.get("device")
        if name in ("_to_copy", "copy", "copy_", "_copy_from"):
            self._transfer(name, args, kwargs)
        elif devices >= {"cpu", "cuda"}:
            args, kwargs = self._meet(name, args, kwargs)
        result = self._run(function, name, args, kwargs, tensors)
        self._after(function, name, args, kwargs, tensors, result)
        return result

    def _lift(self, function: Any, tensor: Any) -> Any:
        result = function(tensor)
        if not hasattr(tensor, "_doctor_origin") and hasattr(result, "fake_device"):
            values.keep(result, tensor)
            if result.device.type == "cpu":
                self._watch.born(result, here())
        return result

    def _read(self, function: Any, name: str, args: Any, kwargs: Any, devices: set[str]) -> Any:
        if "cuda" in devices:
            self._watch.read()
        known = all(values.known(leaf) is not None for leaf in args if isinstance(leaf, torch.Tensor))
        value = values.compute(function, args, kwargs) if known else None
        dtype = args[0].dtype if name == "_local_scalar_dense" else torch.bool
        assumed = any(values.is_assumed(leaf) for leaf in args)
        if "cuda" in devices or value is None or assumed:
            value = self._watch.answer(value, dtype, name not in ("equal", "allclose"), assumed)
        if any(_is_of_gpu(leaf) for leaf in args):
            self._watch.not_taken(value, known and not assumed, _read_before(args[0]))
        return value

    def _transfer(self, name: str, args: Any, kwargs: Any) -> None:
        target, into = kwargs.get("device"), args[0] if name in ("copy", "copy_") else None
        source = args[0] if into is None else args[1]
        to = into.device.type if into is not None else torch.device(target).type if target is not None else source.device.type
        waits = not (kwargs.get("non_blocking") or (into is not None and len(args) > 2 and args[2]))
        if source.device.type == "cpu" and to == "cuda":
            self._watch.copied(source, is_pinned(source), waits)
        elif source.device.type == "cuda" and to == "cpu" and (waits or into is None or not is_pinned(into)):
            # A capture accepts a copy into pinned memory without a wait.
            self._watch.read(is_copy=True)

    def _meet(self, name: str, args: Any, kwargs: Any) -> Any:
        """Reports CPU tensors, then treats them as GPU tensors, so that the run can go on."""
        literal = name in ("fill_", "fill", "masked_fill", "masked_fill_", *_INDEX_PUTS)

        def on_gpu(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
                return leaf
            origin = getattr(leaf, "_doctor_origin", None)
            if leaf.dim() == 0 and origin is not None and origin.kind == INTERNAL and literal:
                if name in _INDEX_PUTS and not _fills_mask(args):
                    self._watch.written(
                        "through a tensor of indices", "x.index_fill_(dim, index, value) takes the number as it is"
                    )
                return leaf
            self._watch.met(leaf, name, leaf.dim() == 0 and name not in _COPYING)
            if leaf.dim() == 0:
                return leaf
            # This mode does not see it: it is not on the stack here.
            moved = torch.ops.aten._to_copy.default(leaf, device=torch.device("cuda", 0))
            if (value := values.known(leaf)) is not None:
                values.keep(moved, value)
            return moved

        return tree_map(on_gpu, (args, kwargs))

    def _run(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        dynamic = self._dynamic(name, args, kwargs)
        if dynamic is not None:
            return dynamic
        # It is for CUDA alone, and has no fake implementation: (new state, workspace
        # of five gates).
        if name == "_thnn_fused_gru_cell":
            return torch.empty_like(args[2]), args[2].new_empty((args[2].shape[0], 5 * args[2].shape[1]))
        try:
            return function(*args, **kwargs)
        except (fake_tensor.UnsupportedOperatorException, NotImplementedError) as error:
            self._refuse(function, error)
        except (fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException):
            self._watch.dynamic(name, *tensors)
            raise
        except RuntimeError as error:
            if function.namespace in ("aten", "prims") or _has_fake_implementation(function):
                raise
            self._refuse(function, error)

    def _refuse(self, function: Any, error: Exception) -> None:
        place = here() or self._watch.target
        raise CustomOperator(
            f"{function.name()} at {place}: it has no fake implementation (torch.library.register_fake gives it one), so what it "
            "returns is not known"
        ) from error

    def _dynamic(self, name: str, args: Any, kwargs: Any) -> Any:
        """The result of an operator whose shape depends on values: computed from known values, else
        with a few rows."""
        first: Any = args[0] if args else None
        shape: tuple[int, ...] = ()
        if name == "nonzero" or name == "nonzero_numpy":
            rows, shape = self._count(first), (first.dim(),)
        elif name == "masked_select":
            rows = self._count(args[1])
        elif name == "index" or name in _INDEX_PUTS:
            masks = [one for one in args[1] if isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8)]
            if not masks or (name != "index" and _fills_mask(args)):
                return None
            self._watch.dynamic(name.strip("_").removesuffix("_impl"), *masks)
            return self._by_mask(name, args, kwargs)
        elif name in ("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique"):
            return self._unique(name, args)
        elif name == "repeat_interleave" and first is not None and (kwargs.get("output_size") is None):
            known = values.known(first)
            rows = values.ask(lambda one: int(one.sum()), known) if known is not None else first.numel() * _STAND_IN_ROWS
            self._watch.dynamic(name, first)
            return torch.empty((rows,), dtype=first.dtype, device=first.device)
        elif name == "_to_sparse":
            self._watch.dynamic(name, first)
            rows, dims = self._count(first), len(first.shape)
            indices = torch.empty((dims, rows), dtype=torch.int64, device=first.device)
            return torch.sparse_coo_tensor(indices, first.new_empty((rows,)), first.shape, check_invariants=False)
        elif name == "_pack_padded_sequence":  # its lengths lie on the CPU
            known, (first_of, second_of) = values.known(args[1]), first.shape[:2]
            length, batch = (second_of, first_of) if args[2] else (first_of, second_of)
            rows, steps = (
                values.ask(lambda one: (int(one.sum()), int(one.max())), known) if known is not None else (length * batch, length)
            )
            return first.new_empty((rows, *first.shape[2:])), torch.empty((steps,), dtype=torch.int64)
        elif name == "bincount":
            self._watch.dynamic(name, first)
            known = values.known(first)
            bins = max(
                values.ask(lambda one: int(one.max()), known) + 1 if known is not None and known.numel() else 1,
                args[2] if len(args) > 2 else kwargs.get("minlength", 0),
            )
            return torch.empty((bins,), dtype=torch.int64, device=first.device)
        else:
            return None
        self._watch.dynamic(name, first)
        dtype = first.dtype if name == "masked_select" else torch.int64
        return torch.empty((rows, *shape), dtype=dtype, device=first.device)

    def _count(self, mask: Any) -> int:
        value = values.known(mask)
        return (
            int(values.ask(lambda one: int(torch.count_nonzero(one)), value))
            if value is not None
            else min(_STAND_IN_ROWS, mask.numel())
        )

    def _by_mask(self, name: str, args: Any, kwargs: Any) -> Any:
        if name != "index":
            return args[0] if name.endswith("_") else args[0].clone()
        indices: list[Any] = []
        for one in args[1]:
            if isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8):
                rows = self._count(one)
                indices += [torch.empty((rows,), dtype=torch.int64, device=args[0].device) for _ in range(one.dim())]
            else:
                indices.append(one)
        return torch.ops.aten.index.Tensor(args[0], indices)

    def _unique(self, name: str, args: Any) -> Any:
        first = args[0]
        self._watch.dynamic(name, first)
        value = values.known(first)
        dim = args[1] if "dim" in name and len(args) > 1 else None
        rows = (
            values.ask(lambda one: torch.unique(one, dim=dim).shape[dim or 0], value)
            if value is not None
            else min(_STAND_IN_ROWS, first.numel())
        )
        shape = (
            (rows,)
            if dim is None
            else tuple(rows if axis == dim % first.dim() else size for axis, size in enumerate(first.shape))
        )
        inverse = first.shape if dim is None else (first.shape[dim],)
        empty = torch.empty
        return (empty(shape, dtype=first.dtype, device=first.device), empty(inverse, dtype=torch.int64, device=first.device),
                empty((rows,), dtype=torch.int64, device=first.device))  # fmt: skip

    def _after(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Any], result: Any) -> None:
        watch = self._watch
        if watch.step:
            made = {leaf.device.type for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
            devices = {leaf.device.type for leaf in tensors} | made
            watch.devices |= devices
            if "cuda" in devices and not function.is_view:  # which runs nothing
                watch.streams.work(is_read="cuda" not in made)
        values.follow(function, args, kwargs, result)
        if function.is_view and tensors and is_pinned(tensors[0]):
            for view in tree_leaves(result):
                view._doctor_pinned = True
        place = here() if watch.step or not tensors else None
        origins = [one._doctor_origin for one in tensors if hasattr(one, "_doctor_origin") and one.device.type == "cpu"]
        origin = joined(origins)
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.device.type == "cpu" and not hasattr(one, "_doctor_origin"):
                if any(tensor.device.type == "cuda" for tensor in tensors):
                    one._doctor_origin = Origin(READ, place)
                elif origin is not None:
                    one._doctor_origin = origin
                elif not tensors:
                    watch.born(one, place)
        if watch.recording:
            place = place or watch.target
            scalars = numbers.taken(name, tree_leaves((args, kwargs)))
            shapes = tuple(tuple(leaf.shape) for leaf in [*tensors, *tree_leaves(result)] if isinstance(leaf, torch.Tensor))
            watch.ran(Kernel(name, scalars, shapes, place))
            if name == "cat":
                result._doctor_cat = Concatenation(place, tuple(id(one) for one in tensors))


def _has_fake_implementation(function: Any) -> bool:
    entry = torch._library.simple_registry.singleton.find(function.name())
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return entry.fake_impl.kernel is not None or any(
        torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key) for key in keys
    )


def _kernel_reads(name: str, function: Any, args: Any, kwargs: Any) -> bool:
    given = {argument: value for (argument, _), value in zip(values.arguments(function), args)} | kwargs
    if name == "normal":  # asks whether any standard deviation is negative: DistributionTemplates.h
        return isinstance(given.get("std"), torch.Tensor)
    if name == "histc":  # bounds that are equal are those of the values: SummaryOps.cu
        return bool(given.get("min", 0) == given.get("max", 0))
    # Takes it with item(): masked_fill__cuda, index_fill_; pytorch#190512.
    if name.startswith(("masked_fill", "index_fill")):
        return isinstance(value := given.get("value"), torch.Tensor) and value.device.type == "cuda"
    # Sorts what is unique of both, for many: TensorCompare.cpp, isin_Tensor_Tensor_out.
    if name == "isin":
        # One may be a number, under another name.
        elements, tested = given.get("elements"), given.get("test_elements")
        if not isinstance(tested, torch.Tensor) or given.get("assume_unique"):
            return False
        count = elements.numel() if isinstance(elements, torch.Tensor) else 1
        return count > 0 and tested.numel() >= int(10.0 * count**0.145)
    # Of `torch.linalg.inv_ex` and its like.
    return name in _READING_KERNELS or given.get("check_errors") is True


def _fills_mask(args: Any) -> bool:
    """Whether `index_put` becomes `masked_fill`, which takes the number as it is: see
    canDispatchToMaskedFill in TensorAdvancedIndexing.cpp."""
    indices = [one for one in args[1] if isinstance(one, torch.Tensor)]
    value = args[2]
    return (
        value.numel() == 1 and value.device.type == "cpu" and len(indices) == 1 and indices[0].dtype in (torch.bool, torch.uint8)
    )


def _read_before(tensor: Any) -> Place | None:
    """Where a tensor of the CPU was copied from the GPU."""
    origin: Origin | None = getattr(tensor, "_doctor_origin", None)
    return origin.place if origin is not None and origin.kind == READ else None


def _is_of_gpu(leaf: Any) -> bool:
    """Whether it lies on the GPU, or was copied from there."""
    return isinstance(leaf, torch.Tensor) and (leaf.device.type == "cuda" or _read_before(leaf) is not None)


def _has_tensor(value: Any) -> bool:
    """Quick for a list of many numbers."""
    return any(map(_has_tensor, value)) if isinstance(value, (list, tuple)) else isinstance(value, torch.Tensor)


def is_pinned(tensor: Any) -> bool:
    return bool(getattr(tensor, "_doctor_pinned", False))


def _is_copied_shallowly() -> bool:
    """Whether it is `copy.copy` that asks: nothing is read."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, torch._tensor.__file__, torch.overrides.__file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == copy.__file__
