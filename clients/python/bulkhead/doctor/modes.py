"""The two modes that watch a run: every operator of every tensor, and the functions of Python that operators do not show."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, Iterator

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from . import branches, fake_cuda, findings, remedies, values
from .findings import Findings
from .source import Place, Use, here, use_of

ARGUMENT, SETUP, STEP, LITERAL, INTERNAL, READ, FOLLOWS = "argument", "setup", "step", "literal", "internal", "read", "follows"
_STAND_IN_ROWS = 2  #: of a result whose number of rows is not known


@dataclass(frozen=True)
class Origin:
    """Where a tensor of the CPU comes from. ``kind``: an argument, made before the step or in it, from a literal for the device,
    made within PyTorch, read from the GPU, or made for the device of another tensor."""

    kind: str
    place: Place | None = None
    made_by: str = ""
    is_module: bool = False


@dataclass(frozen=True)
class Kernel:
    """One operator of a run, to compare two runs by."""

    name: str
    scalars: tuple[Any, ...]
    shapes: tuple[Any, ...]
    place: Place | None

    @property
    def where(self) -> tuple[str, str, int]:
        return self.name, self.place.file if self.place else "", self.place.line if self.place else 0


@dataclass(frozen=True)
class Concatenation:
    place: Place
    operands: tuple[int, ...]


class CustomOperator(BaseException):
    """An operator without a fake implementation: what it returns is not guessed. No ``Exception``, so that user code lets it pass."""


class Watch:
    """What one run of a callable shows. ``step`` is false while the callable is made and its arguments are."""

    def __init__(self, found: Findings) -> None:
        self.found = found
        self.step = False
        self.recording = False
        self.skipped: list[str] = []
        self.trace: list[Kernel] = []
        self.used: set[int] = set()  #: ids of the tensors that operators of this call took
        self._reads: dict[tuple[str, int, int], Any] = {}  #: what the n-th read at a line gave
        self._counts: dict[tuple[str, int], int] = {}
        self._functions: list[tuple[str, Any]] = []

    def begin_call(self) -> None:
        self.trace = []
        self.used = set()
        self._counts = {}

    def answer(self, value: Any, dtype: Any, otherwise: bool) -> Any:
        """What was read there in an earlier call, so that two calls differ by Python's doing alone. ``value`` is None where it is not
        known; ``otherwise`` is what then holds where no branch asks."""
        place = here() if self.step else None
        if place is None:
            return _stand_in(dtype) if value is None else value
        count = self._counts[place.file, place.line] = self._counts.get((place.file, place.line), -1) + 1
        if value is None:
            value = branches.truth(place, count, otherwise) if dtype == torch.bool else type(_stand_in(dtype))(branches.number(place, count))
        return self._reads.setdefault((place.file, place.line, count), value)

    # --- what the stand-ins of torch.cuda saw

    def observe(self, what: str, name: str) -> None:
        place = here() if self.step else None
        if place is None:
            return
        if what == fake_cuda.LAUNCHED:
            told = f"Triton kernel {name} at {place}: it is not launched, and what it writes is not known"
            self.skipped += [] if told in self.skipped else [told]
            return
        if what == fake_cuda.SYNCHRONIZE:
            self.found.add(findings.SYNC, findings.PREVENTS_CAPTURE, place, f"{name} makes the host wait for the GPU, which a capture refuses",
                           "do it before or after the step, outside the graph")  # fmt: skip
        elif what == fake_cuda.STREAM_NOT_FORKED:
            self.found.add(findings.SYNC, findings.PREVENTS_CAPTURE, place, "work goes to a stream that does not wait for the one that is captured",
                           "side.wait_stream(torch.cuda.current_stream()) before `with torch.cuda.stream(side)`")  # fmt: skip
        elif what == fake_cuda.SEED:
            self.found.add(findings.RNG, findings.PREVENTS_CAPTURE, place, f"{name} sets a seed within the step: a capture refuses it",
                           "seed before the step; a replay advances the generator by itself")  # fmt: skip
        else:
            self.found.add(findings.RNG, findings.PREVENTS_CAPTURE, place, f"{name} copies the generator's state within the step",
                           "save and restore the state outside the step")  # fmt: skip

    def not_joined(self, place: Place) -> None:
        self.found.add(findings.SYNC, findings.PREVENTS_CAPTURE, place, "work goes to a stream that is not waited for (CUDA's error 904)",
                       "torch.cuda.current_stream().wait_stream(side) after the `with`")  # fmt: skip

    # --- origins of tensors of the CPU

    def born(self, tensor: Any, place: Place | None, kind: str = "") -> None:
        function, device = self._functions[-1] if self._functions else ("", None)
        if not kind:
            kind = (STEP if self.step else SETUP) if place is not None else INTERNAL
            if function and function not in _FACTORIES:
                kind = INTERNAL
            elif _is_gpu(device):
                kind = LITERAL
            elif device is not None:
                kind = FOLLOWS
        tensor._doctor_origin = Origin(kind, place, function, self._in_module())

    def _in_module(self) -> bool:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if isinstance(frame.f_locals.get("self"), torch.nn.Module) and frame.f_code.co_name == "__init__":
                return True
            frame = frame.f_back
        return False

    @contextlib.contextmanager
    def function(self, name: str, device: Any) -> Iterator[None]:
        self._functions.append((name, device))
        try:
            yield
        finally:
            self._functions.pop()

    # --- findings

    def read(self, tensor: Any, how: str) -> None:
        place = here() if self.step else None
        if place is None:
            return
        use = use_of(place, bool(self._functions) and self._functions[-1][0] in ("__getitem__", "__setitem__"))
        reason = f"{how} reads a value that the GPU computes; the host waits for it{remedies.purpose(use)}"
        self.found.add(findings.HOST_READ, findings.PREVENTS_CAPTURE, place, reason, remedies.host_read(use), use.kind)

    def not_taken(self, value: Any, is_known: bool) -> None:
        """A branch was chosen by a value that was read."""
        place = here() if self.step else None
        if place is None or not self.found.has(findings.HOST_READ, place):
            return
        use = use_of(place)
        if use.kind in ("if", "while", "assert"):
            why = "by the arguments' values" if is_known else "by a stand-in, as the value is not known"
            self.found.change(findings.HOST_READ, place, reason=self._reason(place, use, f"taken as {bool(value)} {why}; the other branch was not run"))

    def _reason(self, place: Place, use: Use, told: str) -> str:
        reason = next(one.reason for one in self.found.sorted() if one.key == (place.file, place.line, findings.HOST_READ))
        return reason if told in reason else f"{reason} ({told})"

    def copied(self, tensor: Any, pinned: bool) -> None:
        """A tensor of the CPU is copied to the GPU."""
        place = here() if self.step else None
        origin = getattr(tensor, "_doctor_origin", None) or Origin(ARGUMENT)
        if place is None or origin.kind == INTERNAL or (origin.kind == LITERAL and tensor.numel() == 0):
            return
        use = use_of(place)
        if origin.place is not None and origin.kind in (STEP, SETUP, FOLLOWS):
            same = (origin.place.file, origin.place.line) == (place.file, place.line)
            lazy = origin.kind == SETUP and _is_lazy_move(use, place)
            self._born_on_cpu(origin, f"and is copied to the GPU {'there' if same else f'in {place}'}", place)
            if lazy:
                self.found.add(findings.CPU_TENSOR, findings.SLOW, place, f"`{use.text}` moves the tensor made in {origin.place} at the first call: a "
                               "capture without a call before it fails, and the address changes", remedies.cpu_tensor(use_of(origin.place), origin.made_by, True, True))  # fmt: skip
                return
            if same:
                return
        what = "a literal" if origin.kind == LITERAL else "a tensor in host memory"
        kind = "pinned" if pinned else "pageable"
        reason = f"`{use.text}` copies {what} to the GPU in the step ({kind} memory)"
        severity = findings.STALE if pinned else findings.PREVENTS_CAPTURE
        remedy = "copy before the step into a static tensor of the device: static.copy_(value)"
        if origin.kind == LITERAL:
            remedy = "make it once, outside the step; or fill a static tensor: torch.full((), value, device=x.device)"
        self.found.add(findings.HOST_COPY, severity, place, reason, remedy, use.kind)

    def met(self, tensor: Any, function: str) -> None:
        """A tensor of the CPU is an argument beside tensors of the GPU."""
        place = here() if self.step else None
        origin = getattr(tensor, "_doctor_origin", None) or Origin(ARGUMENT)
        if place is None or origin.kind == INTERNAL:
            return
        if origin.place is not None and origin.kind in (STEP, SETUP, FOLLOWS):
            self._born_on_cpu(origin, f"and meets a tensor of the GPU in {place} ({function})", place)
        else:
            self.found.add(findings.HOST_COPY, findings.PREVENTS_CAPTURE, place, f"{function} takes a tensor in host memory beside tensors of the GPU",
                           "move it to the device before the step")  # fmt: skip

    def _born_on_cpu(self, origin: Origin, then: str, place: Place) -> None:
        assert origin.place is not None
        use = use_of(origin.place)
        made = "is made on the CPU, before the step," if origin.kind == SETUP else "is made on the CPU"
        remedy = remedies.cpu_tensor(use, origin.made_by, origin.kind == SETUP, origin.is_module)
        self.found.add(findings.CPU_TENSOR, findings.PREVENTS_CAPTURE, origin.place, f"`{use.text}` {made} {then}", remedy, use.kind)

    def pinned(self) -> None:
        place = here() if self.step else None
        if place is not None:
            self.found.add(findings.SYNC, findings.PREVENTS_CAPTURE, place, "pinned host memory is allocated in the step, which a capture refuses",
                           "allocate it once, before the step")  # fmt: skip

    def dynamic(self, name: str) -> None:
        place = here() if self.step else None
        if place is not None:
            use = use_of(place)
            self.found.add(findings.DYNAMIC_SHAPE, findings.PREVENTS_CAPTURE, place,
                           f"`{use.text}` ({name}) has a shape that depends on values of the GPU: the host waits for the count",
                           remedies.DYNAMIC.get(name.strip("_").removesuffix("2").removesuffix("_dim").removesuffix("_consecutive"), remedies.DYNAMIC["nonzero"]), use.kind)  # fmt: skip

    def drawn(self, name: str) -> None:
        place = here() if self.step else None
        if place is not None:
            self.found.add(findings.RNG, findings.PREVENTS_CAPTURE, place, f"{name} draws from a generator that is not registered with the graph",
                           "graph.register_generator_state(generator) before the capture, or use the device's default generator")  # fmt: skip


def _is_lazy_move(use: Use, place: Place) -> bool:
    import ast

    from .source import statement_at

    statement = statement_at(place.file, place.line)
    return isinstance(statement, ast.Assign) and any(ast.unparse(target) in use.text and isinstance(target, ast.Attribute) for target in statement.targets)


#: Functions that make a tensor which the user asked for.
_FACTORIES = frozenset(
    "tensor as_tensor from_numpy asarray arange zeros ones full empty rand randn randint randperm linspace logspace eye hann_window hamming_window "
    "blackman_window bartlett_window kaiser_window range scalar_tensor tril_indices triu_indices complex polar normal empty_strided vander "
    "frombuffer sparse_coo_tensor FloatTensor LongTensor __get__ aten::lift_fresh bernoulli multinomial cartesian_prod meshgrid".split()
)
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
        with self._watch.function(name, kwargs.get("device")):
            if isinstance(kwargs.get("generator"), fake_cuda.CudaGenerator):
                self._watch.drawn(name)
                kwargs = {**kwargs, "generator": None}
            if first is not None and name in _TEXTS:
                return self._text(first, name, args)
            if first is not None and name in ("numpy", "__array__"):
                return self._array(first, args)
            if name == "pin_memory" and first is not None:
                self._watch.pinned()
                first._doctor_pinned = True
                return first
            if name == "is_pinned" and first is not None:
                return getattr(first, "_doctor_pinned", False)
            if name == "record_stream":
                return None
            if name == "data_ptr" and first is not None:
                return id(first)
            if kwargs.pop("pin_memory", False):
                self._watch.pinned()
                result = function(*args, **kwargs)
                result._doctor_pinned = True
                return result
            if name in ("tensor", "as_tensor", "asarray") and args and isinstance(args[0], (list, tuple)):
                args = (tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, args[0]), *args[1:])
            if name in ("stft", "istft") and len(args) > 0:
                args, kwargs = self._same_device(name, args, kwargs)
            return function(*args, **kwargs)

    def _same_device(self, name: str, args: Any, kwargs: Any) -> Any:
        window = kwargs.get("window")
        if isinstance(window, torch.Tensor) and window.device != args[0].device:
            self._watch.met(window if window.device.type == "cpu" else args[0], name)
            with torch.overrides._no_torch_function_mode() if hasattr(torch.overrides, "_no_torch_function_mode") else contextlib.nullcontext():
                kwargs = {**kwargs, "window": torch.empty_like(window, device=args[0].device)}
        return args, kwargs

    def _text(self, tensor: Any, name: str, args: Any) -> str:
        if tensor.device.type == "cuda":
            self._watch.read(tensor, "print" if name != "__format__" else "formatting")
        value = values.known(tensor)
        if name == "__format__" and tensor.dim() == 0:
            item = values.ask(lambda one: one.item(), value) if value is not None else _stand_in(tensor.dtype)
            return format(item, args[1])
        return f"tensor(…, size={tuple(tensor.shape)})"

    def _array(self, tensor: Any, args: Any) -> Any:
        import numpy

        if tensor.device.type == "cuda":
            self._watch.read(tensor, "numpy")
        value = values.known(tensor)
        if value is not None:
            array = values.ask(lambda one: one.detach().to(torch.float32 if one.dtype == torch.bfloat16 else one.dtype).numpy().copy(), value)
        else:
            array = numpy.broadcast_to(numpy.zeros((), _numpy_dtype(tensor.dtype)), tuple(tensor.shape))  # one element
            if tensor.numel() <= values.ELEMENTS_MAX:
                array = array.copy()
        return array.astype(args[1], copy=False) if len(args) > 1 and args[1] is not None else array


class Operators(TorchDispatchMode):  # type: ignore[misc]
    """Every operator, before the fake tensors see it."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        namespace, name = function.namespace, function._schema.name.split("::")[1]
        if namespace == "prim":
            return function(*args, **kwargs)
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), composite):
            with self:  # reached whole in inference mode; its own kernel, for a decomposition in Python leaves out what the kernel asks
                return function._op_dk(composite, *args, **kwargs)
        watch = self._watch
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        watch.used.update(id(tensor) for tensor in tensors)
        if name == "lift_fresh":
            return self._lift(function, args[0])
        if name in ("_local_scalar_dense", "equal", "is_nonzero"):
            return self._read(function, name, args, kwargs, devices)
        if name == "is_pinned":
            return bool(getattr(args[0], "_doctor_pinned", False))
        if name in ("_pin_memory", "pin_memory"):
            args[0]._doctor_pinned = True
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        target = kwargs.get("device")
        if name in ("_to_copy", "copy", "copy_", "_copy_from"):
            self._transfer(name, args, target)
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
            self._watch.read(args[0], {"_local_scalar_dense": "this", "is_nonzero": "bool()"}.get(name, f"torch.{name}"))
        known = all(values.known(leaf) is not None for leaf in args if isinstance(leaf, torch.Tensor))
        value = values.compute(function, args, kwargs) if known else None
        dtype = args[0].dtype if name == "_local_scalar_dense" else torch.bool
        if "cuda" in devices:
            value = self._watch.answer(value, dtype, otherwise=name != "equal")
            self._watch.not_taken(value, known and not any(values.is_assumed(leaf) for leaf in args))
        return _stand_in(dtype) if value is None else value

    def _transfer(self, name: str, args: Any, target: Any) -> None:
        source = args[1] if name in ("copy", "copy_") else args[0]
        to = args[0].device.type if name in ("copy", "copy_") else torch.device(target).type if target is not None else source.device.type
        if source.device.type == "cpu" and to == "cuda":
            self._watch.copied(source, getattr(source, "_doctor_pinned", False))
        elif source.device.type == "cuda" and to == "cpu":
            self._watch.read(source, "the copy to the CPU")

    def _meet(self, name: str, args: Any, kwargs: Any) -> Any:
        """The tensors of the CPU are told, and taken as if they lay on the GPU: otherwise the run would end here."""
        literal = name in ("fill_", "fill", "index_put_", "index_put", "masked_fill", "masked_fill_", "_index_put_impl_")

        def on_gpu(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
                return leaf
            origin = getattr(leaf, "_doctor_origin", None)
            if leaf.dim() == 0 and origin is not None and origin.kind == INTERNAL and literal:
                return leaf
            self._watch.met(leaf, name)
            if leaf.dim() == 0:
                return leaf
            moved = torch.ops.aten._to_copy.default(leaf, device=torch.device("cuda", 0))  # below this mode: it is not on the stack here
            if (value := values.known(leaf)) is not None:
                values.keep(moved, value)
            return moved

        return tree_map(on_gpu, (args, kwargs))

    def _run(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        dynamic = self._dynamic(name, args, kwargs)
        if dynamic is not None:
            return dynamic
        if name == "_thnn_fused_gru_cell":  # for CUDA alone, and without a fake implementation: (new state, workspace of five gates)
            return torch.empty_like(args[2]), args[2].new_empty((args[2].shape[0], 5 * args[2].shape[1]))
        try:
            return function(*args, **kwargs)
        except (torch._subclasses.fake_tensor.UnsupportedOperatorException, NotImplementedError) as error:
            self._refuse(function, error)
        except RuntimeError as error:
            if function.namespace in ("aten", "prims"):
                raise
            self._refuse(function, error)

    def _refuse(self, function: Any, error: Exception) -> None:
        place = here()
        raise CustomOperator(f"{function.name()} at {place}: it has no fake implementation, so what it returns is not known") from error

    def _dynamic(self, name: str, args: Any, kwargs: Any) -> Any:
        """The result of an operator whose shape depends on values: by the known values, else with a few rows."""
        first: Any = args[0] if args else None
        shape: tuple[int, ...] = ()
        if name == "nonzero" or name == "nonzero_numpy":
            rows, shape = self._count(first), (first.dim(),)
        elif name == "masked_select":
            rows = self._count(args[1])
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [one for one in args[1] if isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8)]
            if not masks or (name != "index" and args[2].numel() == 1 and args[2].device.type == "cpu"):
                return None
            if any(mask.device.type == "cuda" for mask in masks):
                self._watch.dynamic(name.strip("_").removesuffix("_impl"))
            return self._by_mask(name, args, kwargs)
        elif name in ("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique"):
            return self._unique(name, args)
        elif name == "repeat_interleave" and first is not None and (kwargs.get("output_size") is None):
            known = values.known(first)
            rows = values.ask(lambda one: int(one.sum()), known) if known is not None else first.numel() * _STAND_IN_ROWS
            if first.device.type == "cuda":
                self._watch.dynamic(name)
            return torch.empty((rows,), dtype=first.dtype, device=first.device)
        elif name == "bincount":
            if first.device.type == "cuda":
                self._watch.dynamic(name)
            known = values.known(first)
            bins = max(values.ask(lambda one: int(one.max()), known) + 1 if known is not None and known.numel() else 1, args[2] if len(args) > 2 else kwargs.get("minlength", 0))
            return torch.empty((bins,), dtype=torch.int64, device=first.device)
        else:
            return None
        if first.device.type == "cuda":
            self._watch.dynamic(name)
        dtype = first.dtype if name == "masked_select" else torch.int64
        return torch.empty((rows, *shape), dtype=dtype, device=first.device)

    def _count(self, mask: Any) -> int:
        value = values.known(mask)
        return int(values.ask(lambda one: int(torch.count_nonzero(one)), value)) if value is not None else min(_STAND_IN_ROWS, mask.numel())

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
        if first.device.type == "cuda":
            self._watch.dynamic(name)
        value = values.known(first)
        dim = args[1] if "dim" in name and len(args) > 1 else None
        rows = values.ask(lambda one: torch.unique(one, dim=dim).shape[dim or 0], value) if value is not None else min(_STAND_IN_ROWS, first.numel())
        shape = (rows,) if dim is None else tuple(rows if axis == dim % first.dim() else size for axis, size in enumerate(first.shape))
        inverse = first.shape if dim is None else (first.shape[dim],)
        empty = torch.empty
        return (empty(shape, dtype=first.dtype, device=first.device), empty(inverse, dtype=torch.int64, device=first.device),
                empty((rows,), dtype=torch.int64, device=first.device))  # fmt: skip

    def _after(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Any], result: Any) -> None:
        watch = self._watch
        values.follow(function, args, kwargs, result)
        place = here() if watch.step or not tensors else None
        origins = [one._doctor_origin for one in tensors if hasattr(one, "_doctor_origin") and one.device.type == "cpu"]
        origin = min(origins, key=lambda one: one.kind in (FOLLOWS, INTERNAL), default=None)
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.device.type == "cpu" and not hasattr(made, "_doctor_origin"):
                if any(tensor.device.type == "cuda" for tensor in tensors):
                    made._doctor_origin = Origin(READ, place)
                elif origin is not None:
                    made._doctor_origin = origin
                elif not tensors:
                    watch.born(made, place)
        if watch.recording and place is not None:
            scalars = tuple(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (int, float)) and not isinstance(leaf, bool))
            shapes = tuple(tuple(leaf.shape) for leaf in [*tensors, *tree_leaves(result)] if isinstance(leaf, torch.Tensor))
            watch.trace.append(Kernel(name, scalars, shapes, place))
            if name == "cat":
                result._doctor_cat = Concatenation(place, tuple(id(one) for one in tensors))


def _is_gpu(device: Any) -> bool:
    if isinstance(device, int):
        return True
    return device is not None and str(device).split(":")[0] == "cuda"


def _stand_in(dtype: Any) -> Any:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _numpy_dtype(dtype: Any) -> Any:
    return str(dtype).split(".")[1].replace("bfloat16", "float32")
