"""Findings of torch.compile: where Dynamo breaks the graph, and where Inductor skips CUDA Graphs.

The installed PyTorch's Dynamo, AOTAutograd and Inductor run on the fake tensors, up to the lowered
graph, where Inductor decides on CUDA Graphs. No kernel is generated.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import re
import warnings
from types import CodeType, SimpleNamespace
from typing import Any, Callable, Iterator
from unittest import mock

import torch
from torch._dynamo import convert_frame, trace_rules
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from . import exported, findings
from .calls import called
from .fake.watch import stand_in
from .findings import Findings, Note
from .source import Location, is_users, line_location, one_line, location_of

_READS = re.compile(r"data.dependent|depends on data|Tensor\.item|scalar", re.IGNORECASE)
_SHAPES = re.compile(r"dynamic shape|dynamic output|nonzero", re.IGNORECASE)
_MET = re.compile(r"got \w+\(['\"](.+?)['\"]\)")
_EXPLAINED = re.compile(r"^\s*Explanation: (.+)", re.MULTILINE)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
Said = tuple["Location | None", str]  #: None: of the whole target


#: `mode="reduce-overhead"` for whole graphs: without partitions, Inductor names its reason for
# skipping CUDA Graphs. Omits passes that compute on the GPU.
_REDUCE_OVERHEAD = {
    "triton.cudagraphs": True,
    "graph_partition": False,
    "shape_padding": False,
    "joint_graph_constant_folding": False,
    "force_disable_caches": True,
}


def tell(found: Findings, said: list[Said], target: Location) -> list[Note]:
    """Adds what the compiler said of a line to a finding of that line. Returns the rest, one note
    for each line."""
    notes: dict[tuple[str, int], Note] = {}
    for location, text in said:
        location = location or target
        known = [one for one in found.sorted() if (one.file, one.line) == (location.file, location.line)]
        code = findings.DYNAMIC_SHAPE if _SHAPES.search(text) else findings.HOST_READ if _READS.search(text) else ""
        told = f"torch.compile: {text}"
        if known:
            one = next((one for one in known if one.code == code), known[0])
            if told not in one.reason:
                found.change(one, reason=f"{one.reason}. {told}")
        else:
            before = notes.get((location.file, location.line))
            if before is None or told not in before.reason:
                reason = told if before is None else f"{before.reason}. {told}"
                notes[location.file, location.line] = Note(
                    location.file, location.line, location.columns[0], location.function, reason
                )
    return list(notes.values())


def said_of(mode: Any, step: Callable[..., Any], args: Any, kwargs: Any) -> list[Said]:
    said: list[Said] = []
    torch._dynamo.reset()
    _forget_functions()
    logging.disable(logging.WARNING)
    try:
        with (mode, _stand_in_values(mode), _skipped_frames(said), warnings.catch_warnings(),
              torch._inductor.config.patch(compile_threads=1)):  # no processes that compile  # fmt: skip
            warnings.simplefilter("ignore")
            called(torch.compile(step, backend=functools.partial(_compile, said)), args, kwargs)
    except Exception as error:
        said.append((_innermost(getattr(error, "real_stack", None)) or location_of(error), _gave_up("", error)))
    finally:
        breaks = [
            (_innermost(one.user_stack), f"graph break, {_sentence(one.reason)}")
            for one in torch._dynamo.utils.graph_break_reasons
        ]
        logging.disable(logging.NOTSET)
        torch._dynamo.reset()
        _forget_functions()
    return breaks + said


def _forget_functions() -> None:
    """Clears Dynamo's tables of functions, which have stand-ins."""
    for kept in (trace_rules.get_torch_obj_rule_map, getattr(TorchInGraphFunctionVariable, "_get_handlers", None)):
        getattr(kept, "cache_clear", lambda: None)()


@contextlib.contextmanager
def _skipped_frames(said: list[Said]) -> Iterator[None]:
    """Collects the functions that Dynamo leaves to Python altogether: these break no graph, as
    they have none."""

    def skipped(error: Exception, code: CodeType, *unused: Any) -> str:
        location = _innermost(getattr(error, "real_stack", None)) or line_location(code.co_filename, code.co_firstlineno, code.co_name)
        part = "all" if _name(code.co_name) == code.co_name else "the rest"
        said.append((location, f"{part} of {_name(code.co_name)} runs without a graph, {_sentence(str(error))}"))
        return ""

    with mock.patch.object(convert_frame, "format_error_msg", skipped):
        yield


def _compile(said: list[Said], graph: Any, inputs: Any) -> Any:
    """Dynamo's backend: each of its graphs goes through Inductor."""
    from torch._inductor.compile_fx import compile_fx

    settings = {name: value for name, value in _REDUCE_OVERHEAD.items() if name in torch._inductor.config._config}
    try:
        return compile_fx(graph, inputs, inner_compile=functools.partial(_lower, said), config_patches=settings)
    except Exception as error:
        said.append((None, _gave_up("Inductor ", error)))
        return graph.forward
    finally:
        _forget_device()


def _lower(said: list[Said], graph: Any, inputs: Any, **options: Any) -> Any:
    """Inductor's compiler of one graph, without code generation. The graph itself then runs on
    the fake tensors."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx, cudagraph_utils
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering

    eager = make_boxed_func(torch.fx.GraphModule(graph, copy.deepcopy(graph.graph)).forward)
    changed = _changed_inputs(graph.graph, options.get("static_input_idxs") or ())
    reason = ""
    if changed:
        reason = cudagraph_utils.get_mutation_stack_trace(cudagraph_utils.get_placeholder_info(graph.graph), changed)
    with DebugContext(), mock.patch.object(GraphLowering, "compile_to_module", _without_code):
        lowered = compile_fx.fx_codegen_and_compile(graph, inputs, (), **options)
    for text in (lowered.disabled_cudagraphs_reason, reason):
        if text:
            said.append(_skip(text))
    return eager


def _without_code(graph: Any) -> Any:
    graph.scheduler = SimpleNamespace(nodes=())
    return SimpleNamespace(call=None)


def _changed_inputs(graph: Any, static: Any) -> list[int]:
    """The inputs that the graph writes, except parameters and buffers, whose addresses stay: a
    replay would write to an old address."""
    copy_ = torch.ops.aten.copy_.default
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return [index for index, node in enumerate(inputs)
            if index not in static and any(use.target is copy_ and use.args[0] is node for use in node.users)]  # fmt: skip


def _skip(text: str) -> Said:
    """Inductor's message, and the user line that it names."""
    said = one_line(re.split(r"\.?\s*Found from", text)[0].strip())
    prefix = "skipping cudagraphs due to "
    return exported.location_in(text), said if said.startswith(prefix) else prefix + said


def _forget_device() -> None:
    """Clears what Inductor keeps about the absent GPU."""
    from torch._inductor import utils
    from torch._inductor.runtime.hints import DeviceProperties

    for kept in (DeviceProperties.create, utils.is_big_gpu):
        kept.cache_clear()


def _gave_up(who: str, error: Exception) -> str:
    return "not asked further: it needs a driver" if "NVIDIA driver" in str(error) else f"{who}gives up, {_why(error)}"


def _why(error: Exception) -> str:
    """The message of the error that Dynamo wraps, if any."""
    if isinstance(error, DynamicOutputShapeException):
        return f"the shape that {error} returns depends on data"
    inner = _MET.search(str(error))
    return one_line(inner[1], 120) if inner else _sentence(str(error) or type(error).__name__)


def _sentence(text: str) -> str:
    """The first line of Dynamo's message, and its explanation."""
    first = text.strip().splitlines()[0]
    if first.startswith("generic_jump"):
        return "a branch depends on data"
    explained = _EXPLAINED.search(text)
    return one_line(_ADDRESS.sub("", f"{first}: {explained[1].rstrip('.')}" if explained else first), 200)


def _innermost(stack: Any) -> Location | None:
    users = [frame for frame in stack or () if is_users(frame.filename)]
    if not users:
        return None
    return line_location(users[-1].filename, users[-1].lineno, _name(users[-1].name))


def _name(function: str) -> str:
    """Of the function that Dynamo goes on with after a graph break, that of the whole."""
    return re.sub(r"torch_dynamo_resume_in_(\w+)_at_\d+", r"\1", function)


@contextlib.contextmanager
def _stand_in_values(mode: Any) -> Iterator[None]:
    """At a graph break, the code between two graphs runs with fake tensors: while this is entered,
    it reads stand-in values. Other threads may use PyTorch's table meanwhile."""
    aten = torch.ops.aten
    table = fake_impls.op_implementations_dict

    def ours(operator: Any, answer: Callable[..., Any]) -> Any:
        before = table.get(operator)

        def implemented(asked: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            return answer(*args) if asked is mode or before is None else before(asked, function, *args, **kwargs)

        return implemented

    answers: dict[Any, Callable[..., Any]] = {
        aten._local_scalar_dense.default: lambda tensor: stand_in(tensor.dtype),
        aten.nonzero.default: lambda tensor: tensor.new_empty((2, tensor.dim()), dtype=torch.int64),
        aten.masked_select.default: lambda tensor, mask: tensor.new_empty((2,)),
    }
    before = {operator: table.get(operator) for operator in answers}
    for operator, answer in answers.items():
        table[operator] = ours(operator, answer)
    try:
        yield
    finally:
        for operator, one in before.items():
            if one is None:
                table.pop(operator, None)
            else:
                table[operator] = one
