"""What torch.compile sees: where Dynamo breaks the graph, and where Inductor would skip CUDA Graphs."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any, Callable, Iterator

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from . import exported, findings
from .findings import Findings
from .source import Place, is_users, one_line, place_of

_READS = re.compile(r"data.dependent|depends on data|Tensor\.item|scalar", re.IGNORECASE)
_SHAPES = re.compile(r"dynamic shape|dynamic output|nonzero", re.IGNORECASE)
_MET = re.compile(r"got \w+\(['\"](.+?)['\"]\)")
_Said = tuple["Place | None", str]


def tell(found: Findings, mode: Any, step: Callable[..., Any], args: Any, kwargs: Any) -> list[str]:
    """Adds to the findings of a line what the compiler says of it. Returns what it says of lines that have no finding."""
    told: list[str] = []
    for place, said in _said(mode, step, args, kwargs):
        known = [] if place is None else [one for one in found.sorted() if (one.file, one.line) == (place.file, place.line)]
        code = findings.HOST_READ if _READS.search(said) else findings.DYNAMIC_SHAPE if _SHAPES.search(said) else ""
        if place is not None and known:
            found.change(known[0].code, place, reason=f"{known[0].reason}. torch.compile: {said}")
        elif place is not None and code:
            found.add(code, findings.PREVENTS_CAPTURE, place, f"torch.compile: {said}", "keep values and shapes on the device: torch.where(mask, a, b)")
        else:
            told.append(f"torch.compile{f' at {place}' if place else ''}: {said}")
    return told


def _said(mode: Any, step: Callable[..., Any], args: Any, kwargs: Any) -> list[_Said]:
    torch._dynamo.reset()
    logging.disable(logging.WARNING)
    try:
        with mode, _stand_in_values(mode):
            explained = torch._dynamo.explain(step)(*args, **kwargs)
    except Exception as error:
        return [(_innermost(getattr(error, "real_stack", None)) or place_of(error), f"gives up, {_why(error)}")]
    finally:
        logging.disable(logging.NOTSET)
        torch._dynamo.reset()
    said: list[_Said] = [(_innermost(reason.user_stack), f"graph break, {_sentence(reason.reason)}") for reason in explained.break_reasons]
    for graph in explained.graphs:
        said += [_skip(node) for node in graph.graph.nodes if _is_on_cpu(node)]
    return list(dict.fromkeys(said))


def _is_on_cpu(node: Any) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _skip(node: Any) -> _Said:
    from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes

    reason = str(check_multiple_devices_or_any_cpu_nodes({torch.device("cpu"): node, torch.device("cuda"): node}))
    return exported.place_of(node), one_line(reason.splitlines()[0].removesuffix(". Found from : "))


def _why(error: Exception) -> str:
    """The words of the error that Dynamo met, where it wraps one."""
    if isinstance(error, DynamicOutputShapeException):
        return f"the shape that {error} returns depends on data"
    inner = _MET.search(str(error))
    return one_line(inner[1], 120) if inner else _sentence(str(error) or type(error).__name__)


def _sentence(text: str) -> str:
    sentence = one_line(text.strip().splitlines()[0], 120)
    return "a branch depends on data" if sentence.startswith("generic_jump") else sentence


def _innermost(stack: Any) -> Place | None:
    users = [frame for frame in stack or () if is_users(frame.filename)]
    if not users:
        return None
    name = re.sub(r"torch_dynamo_resume_in_(\w+)_at_\d+", r"\1", users[-1].name)
    return Place(users[-1].filename, users[-1].lineno, 1, 0, name)


@contextlib.contextmanager
def _stand_in_values(mode: Any) -> Iterator[None]:
    """Where the graph breaks, the code between two graphs runs with fake tensors: it reads stand-ins."""
    aten = torch.ops.aten
    table = fake_impls.op_implementations_dict

    def ours(operator: Any, stand_in: Callable[..., Any]) -> tuple[Any, Any]:
        before = table.get(operator)

        def implemented(asked: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            return stand_in(*args) if asked is mode or before is None else before(asked, function, *args, **kwargs)

        table[operator] = implemented
        return operator, before

    replaced = [
        ours(aten._local_scalar_dense.default, lambda tensor: True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1),
        ours(aten.nonzero.default, lambda tensor: tensor.new_empty((2, tensor.dim()), dtype=torch.int64)),
        ours(aten.masked_select.default, lambda tensor, mask: tensor.new_empty((2,))),
    ]
    try:
        yield
    finally:
        for operator, before in replaced:
            table[operator] = before
