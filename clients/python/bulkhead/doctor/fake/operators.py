"""The mode that watches every tensor operator."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..source import here
from . import values
from .origins import INTERNAL, READ, Origin, is_of_gpu, is_pinned, joined, read_before
from .watch import Concatenation, CustomOperator, Kernel, Watch

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
_STAND_IN_ROWS = 2  #: of a result whose number of rows is unknown
#: Of `y[0] = number`, `y[mask] = number`: PyTorch makes a tensor of the number, whose value
#: the kernel takes.
_ASSIGNMENTS = frozenset(("fill_", "copy_", "index_put_"))


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
        name = function._schema.name.split("::")[1]
        if function.namespace == "prim":
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
        if any(is_of_gpu(leaf) for leaf in args):
            self._watch.not_taken(value, known and not assumed, read_before(args[0]))
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
                    fills = "x.index_fill_(dim, index, value) takes the number as it is"
                    self._watch.written("through a tensor of indices", fills)
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
        location = here() or self._watch.target
        raise CustomOperator(
            f"{function.name()} at {location}: it has no fake implementation (torch.library.register_fake gives it one), so what it "
            "returns is not known"
        ) from error

    def _dynamic(self, name: str, args: Any, kwargs: Any) -> Any:
        """The result of an operator whose shape depends on values: computed from known values, else
        with a few rows."""
        first: Any = args[0] if args else None
        shape: tuple[int, ...] = ()
        if name == "nonzero" or name == "nonzero_numpy":
            rows, shape = _count(first), (first.dim(),)
        elif name == "masked_select":
            rows = _count(args[1])
        elif name == "index" or name in _INDEX_PUTS:
            masks = [one for one in args[1] if _is_mask(one)]
            if not masks or (name != "index" and _fills_mask(args)):
                return None
            self._watch.dynamic(name.strip("_").removesuffix("_impl"), *masks)
            return self._by_mask(name, args, kwargs)
        elif name in ("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique"):
            return self._unique(name, args)
        elif name == "repeat_interleave" and first is not None and (kwargs.get("output_size") is None):
            rows = values.asked(first, lambda one: int(one.sum()), first.numel() * _STAND_IN_ROWS)
            self._watch.dynamic(name, first)
            return torch.empty((rows,), dtype=first.dtype, device=first.device)
        elif name == "_to_sparse":
            self._watch.dynamic(name, first)
            rows, dims = _count(first), len(first.shape)
            indices = torch.empty((dims, rows), dtype=torch.int64, device=first.device)
            return torch.sparse_coo_tensor(indices, first.new_empty((rows,)), first.shape, check_invariants=False)
        elif name == "_pack_padded_sequence":  # its lengths lie on the CPU
            length, batch = reversed(first.shape[:2]) if args[2] else first.shape[:2]
            rows, steps = values.asked(args[1], lambda one: (int(one.sum()), int(one.max())), (length * batch, length))
            return first.new_empty((rows, *first.shape[2:])), torch.empty((steps,), dtype=torch.int64)
        elif name == "bincount":
            self._watch.dynamic(name, first)
            bins = values.asked(first, lambda one: int(one.max()) + 1 if one.numel() else 1, 1)
            least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            return torch.empty((max(bins, least),), dtype=torch.int64, device=first.device)
        else:
            return None
        self._watch.dynamic(name, first)
        dtype = first.dtype if name == "masked_select" else torch.int64
        return torch.empty((rows, *shape), dtype=dtype, device=first.device)

    def _by_mask(self, name: str, args: Any, kwargs: Any) -> Any:
        if name != "index":
            return args[0] if name.endswith("_") else args[0].clone()
        indices: list[Any] = []
        for one in args[1]:
            if _is_mask(one):
                rows = _count(one)
                indices += [torch.empty((rows,), dtype=torch.int64, device=args[0].device) for _ in range(one.dim())]
            else:
                indices.append(one)
        return torch.ops.aten.index.Tensor(args[0], indices)

    def _unique(self, name: str, args: Any) -> Any:
        first = args[0]
        self._watch.dynamic(name, first)
        dim = args[1] if "dim" in name and len(args) > 1 else None
        rows = values.asked(first, lambda one: torch.unique(one, dim=dim).shape[dim or 0], min(_STAND_IN_ROWS, first.numel()))
        shape, inverse = [rows], first.shape
        if dim is not None:
            shape, inverse = list(first.shape), (first.shape[dim],)
            shape[dim] = rows
        empty = torch.empty
        return (empty(shape, dtype=first.dtype, device=first.device), empty(inverse, dtype=torch.int64, device=first.device),
                empty((rows,), dtype=torch.int64, device=first.device))  # fmt: skip

    def _after(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Any], result: Any) -> None:
        watch = self._watch
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if watch.step:
            made = {leaf.device.type for leaf in results}
            devices = {leaf.device.type for leaf in tensors} | made
            watch.devices |= devices
            if "cuda" in devices and not function.is_view:  # which runs nothing
                watch.streams.work(is_read="cuda" not in made)
        values.follow(function, args, kwargs, result)
        if function.is_view and tensors and is_pinned(tensors[0]):
            for view in results:
                view._doctor_pinned = True
        location = here() if watch.step or not tensors else None
        origins = [one._doctor_origin for one in tensors if hasattr(one, "_doctor_origin") and one.device.type == "cpu"]
        origin = joined(origins)
        for one in results:
            if one.device.type == "cpu" and not hasattr(one, "_doctor_origin"):
                if any(tensor.device.type == "cuda" for tensor in tensors):
                    one._doctor_origin = Origin(READ, location)
                elif origin is not None:
                    one._doctor_origin = origin
                elif not tensors:
                    watch.born(one, location)
        if watch.recording:
            location = location or watch.target
            scalars = _taken(name, tree_leaves((args, kwargs)))
            shapes = tuple(tuple(leaf.shape) for leaf in [*tensors, *results])
            watch.ran(Kernel(name, scalars, shapes, location))
            if name == "cat":
                result._doctor_cat = Concatenation(location, tuple(id(one) for one in tensors))


def _is_mask(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8)


def _count(mask: Any) -> int:
    return int(values.asked(mask, lambda one: int(torch.count_nonzero(one)), min(_STAND_IN_ROWS, mask.numel())))


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
    return args[2].numel() == 1 and args[2].device.type == "cpu" and len(indices) == 1 and _is_mask(indices[0])


def _taken(name: str, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The numbers among the arguments of an operator, and those that an assignment has
    made tensors of."""
    return tuple(
        value for value in (_assigned(leaf) if name in _ASSIGNMENTS else leaf for leaf in leaves)
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    )  # fmt: skip


def _assigned(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() > 0 or leaf.device.type != "cpu":
        return leaf
    origin = getattr(leaf, "_doctor_origin", None)
    return None if origin is None or origin.kind != INTERNAL else values.asked(leaf, lambda one: one.item())
