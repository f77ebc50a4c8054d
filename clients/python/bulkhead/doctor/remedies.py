"""Remedies: what to write instead, in terms of the found line."""

from __future__ import annotations

import ast
import re

from .source import Use

#: Those that have a form without the read.
_LINALG = re.compile(r"torch\.linalg\.(inv|solve|cholesky|lu_factor|ldl_factor)\(")
_ATTRIBUTE = re.compile(r"self\.(\w+) = ")

#: Readable names for the uses of a value.
USES = {
    "if": "decides the branch `{around}`",
    "while": "decides whether the loop `{around}` goes on",
    "assert": "is asserted",
    "match": "decides the case of `{around}`",
    "f-string": "is written into a text",
    "print": "is printed",
    "index": "is an index in `{around}`",
    "slice": "bounds the slice `{around}`",
    "range": "bounds a loop",
    "loop": "is gone through in a loop",
    "argument": "is an argument of `{around}`",
    "return": "is returned",
    "value": "",
}


def purpose(use: Use) -> str:
    text = USES[use.kind].format(around=use.around)
    if use.around == use.text:
        text = {"if": "decides the branch", "while": "decides whether the loop goes on"}.get(use.kind, text)
    return f"; it {text}" if text else ""


def host_read(use: Use, function: str = "") -> str:
    """``function``: the PyTorch function that was called."""
    kept = _without_read(use.text)
    called = use.text.split("(")[0].split(".")[-1]
    if function == "istft":
        return (
            "it asks whether the windows' sum is zero: add the overlaps up yourself, torch.fft.irfft and torch.nn.functional.fold"
        )
    if (call := _LINALG.match(use.text)) is not None:
        return f"it reads whether it failed: torch.linalg.{call[1]}_ex gives that as a tensor, which is looked at after the step"
    if _checks_arguments(use.text):
        return "it checks its arguments: validate_args=False leaves that out; check them before the step"
    if use.kind == "if":
        return (f"compute both branches and choose on the device, torch.where({condition(use)}, a, b), or decide once before the "
                "step; "
                ".item() and bool() read the same value")  # fmt: skip
    if use.kind == "match":
        return f"compute all cases and choose on the device, torch.where({kept} == a, one, other), or decide once before the step"
    if use.kind == "while":
        return (
            f"run a fixed number of iterations and mask those after the end: done = done | ~({condition(use)}); x = "
            "torch.where(done, x, new)"
        )
    if use.kind == "assert":
        return f"check it before the step, or on the device: torch._assert_async({condition(use)})"
    if called.startswith(("masked_fill", "index_fill")):
        return f"{called} takes its value with item(): torch.where(mask, value, x) takes a tensor of the device as it is"
    if called in ("save", "dump", "dumps", "str", "repr", "format") or use.kind in ("print", "f-string"):
        return "return the tensor, and write it after the replay, outside the step"
    if use.kind == "slice":
        return "keep the full length and mask what is behind the end: torch.arange(length, device=x.device) < end"
    if use.kind == "index":
        return "index with a tensor of one element: x.index_select(dim, i.view(1)), or cache.index_copy_(dim, i.view(1), new)"
    if use.kind == "range":
        return "run a fixed number of iterations: for i in range(maximum), with x = torch.where(i < count, new, x)"
    if use.kind == "loop":
        return (
            "compute on the whole tensor instead of in a loop over its values; or return the tensor, and go through it after "
            "the replay"
        )
    if called in ("tensor", "as_tensor", "asarray"):
        return (
            f"torch.{called} reads each tensor of its list: torch.stack and arithmetic keep them on the device, such as n - "
            "starts[-1:]"
        )
    if called in _SIZED:
        return "make it of the greatest size once, before the step, and mask it: torch.arange(maximum, device=x.device) < end"
    if use.kind == "argument" and use.around.split("(")[0].split(".")[-1] in _SIZED:
        return f"make it of the greatest size once, before the step, and mask it: torch.arange(maximum, device=x.device) < {kept}"
    if (chosen := _greater(use.text)) is not None:
        return f"Python's {called}() asks which is {'greater' if called == 'max' else 'less'}: use {chosen}"
    if use.text.startswith(("max(", "min(", "any(", "all(")):
        return f"Python's {called}() reads each element: use the tensor's own, x.{called}()"
    return f"keep {kept} a tensor on the device, or pass the number into the step from outside"


_SIZED = frozenset(("arange", "zeros", "ones", "full", "empty", "linspace", "randn", "rand"))
_READS = frozenset(("item", "tolist", "cpu", "numpy", "detach"))
_TRUTHS = frozenset("any all eq ne lt le gt ge isnan isinf isfinite isin logical_and logical_or logical_not equal bool".split())


class _OnDevice(ast.NodeTransformer):
    """Removes the reads from an expression; the rest computes the same on the device."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _READS and not node.args:
            return node.func.value
        if isinstance(node.func, ast.Name) and node.func.id in ("int", "float", "bool") and len(node.args) == 1:
            return node.args[0]
        return node


def condition(use: Use) -> str:
    """The boolean tensor that decides an `if`, `while` or `assert`; of `and` and `or` the part
    that was read."""
    node = _parsed(use.around)
    if node is None:
        return _without_read(use.text)
    while isinstance(node, ast.BoolOp):
        node = next((part for part in node.values if use.text in ast.unparse(part)), node.values[0])
    inverted = False
    while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inverted, node = not inverted, node.operand
    node = _OnDevice().visit(node)
    text = ast.unparse(node)
    called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    if isinstance(node, ast.Compare) or called in _TRUTHS:
        return f"~({text})" if inverted else text
    return f"{text} {'==' if inverted else '!='} 0"


def _checks_arguments(text: str) -> bool:
    """Whether it makes a distribution, which asks its arguments whether they are valid."""
    node = _parsed(text)
    return (
        isinstance(node, ast.Call)
        and re.fullmatch(r"(torch\.)?distributions\.\w+", ast.unparse(node.func)) is not None
        and all(one.arg != "validate_args" for one in node.keywords)
    )


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:  # the text was truncated
        return None


def _without_read(text: str) -> str:
    for read in (".item()", ".tolist()", ".cpu()", ".numpy()", ".detach()"):
        if text.endswith(read):
            return _without_read(text[: -len(read)])
    for call in ("int(", "float(", "bool("):
        if text.startswith(call) and text.endswith(")"):
            return _without_read(text[len(call) : -1])
    return text


def _greater(text: str) -> str | None:
    """What computes Python's `max` or `min` of two or more on the device; None of anything else."""
    node = _parsed(text)
    if not isinstance(node, ast.Call) or len(node.args) < 2 or node.keywords or ast.unparse(node.func) not in ("max", "min"):
        return None
    name = ast.unparse(node.func)
    numbers = [one for one in node.args if isinstance(one.operand if isinstance(one, ast.UnaryOp) else one, ast.Constant)]
    tensors = [one for one in node.args if one not in numbers]
    if not tensors or any(isinstance(one, ast.Starred) for one in tensors):
        return None
    made = ast.unparse(tensors[0])
    for other in tensors[1:]:
        made = f"torch.{name}imum({made}, {ast.unparse(other)})"
    if numbers and isinstance(tensors[0], (ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp)) and len(tensors) == 1:
        made = f"({made})"
    return made + "".join(f".clamp({'min' if name == 'max' else 'max'}={ast.unparse(one)})" for one in numbers)


#: They take no device of a GPU.
_WITHOUT_DEVICE = re.compile(r"torch\.(\w*Tensor|from_numpy|frombuffer)\(")
_MOVED = re.compile(r"\.to\((?:device=)?([\w.]*\bdevice)\b")
_LIKE = re.compile(r"dtype=([\w.]+)\.dtype")  #: of a tensor of the step
_FACTORIES = tuple("arange zeros ones full empty rand randn randint randperm linspace logspace eye hann_window".split())


def cpu_tensor(use: Use, made_by: str, in_init: bool, is_module: bool, moved_by: str = "") -> str:
    """``moved_by``: the expression that copies it to the GPU."""
    if in_init and is_module:
        assigned = _ATTRIBUTE.match(use.around)
        return buffer(assigned[1], use.text) if assigned else f"where it is kept, {buffer('name', 'value')}"
    if in_init:
        return f"make it on the device once: {_with_device(use.text, 'device')}"
    if made_by in ("tensor", "as_tensor") or _WITHOUT_DEVICE.match(use.text):
        return (
            "make it once, before the step, on the device, and keep it; a number that changes is an input: x.fill_(value) of "
            "a static tensor"
        )
    moved, like = _MOVED.search(use.around) or _MOVED.search(moved_by), _LIKE.search(use.text)
    device = moved[1] if moved else f"{like[1]}.device" if like else "x.device"
    return f"give it the device: {_with_device(use.text, device)}"


def module(use: Use, is_kept: bool) -> str:
    """``is_kept``: another module keeps it, where that does not see it."""
    if is_kept:
        return f"keep `{use.text}` in an attribute of the module, or in a torch.nn.ModuleList: it then moves with the module"
    return f"move it once, before the step: {use.text}.to(device)"


def buffer(name: str, value: str) -> str:
    return f'self.register_buffer("{name}", {value}, persistent=False): a buffer moves with the module'


def _with_device(text: str, device: str) -> str:
    for name in _FACTORIES:
        start = text.find(f"torch.{name}(")
        if start >= 0:
            depth = 0
            for at in range(start, len(text)):
                depth += (text[at] == "(") - (text[at] == ")")
                if depth == 0 and text[at] == ")":
                    return f"{text[start:at]}, device={device})"
    if _WITHOUT_DEVICE.match(text):
        return f"{text}.to({device})"
    return f"{text}, with device={device}"


def dynamic(name: str) -> str:
    """Of an operator whose shape depends on values."""
    name = name.strip("_").removesuffix("2").removesuffix("_dim").removesuffix("_consecutive")
    return _DYNAMIC.get(name, _DYNAMIC["nonzero"])


_DYNAMIC = {
    "nonzero": "keep the full shape and a mask: torch.where(mask, x, 0)",
    "index": "keep the full shape: torch.where(mask, x, 0), or x.masked_fill(~mask, 0)",
    "index_put": "x.masked_scatter_(mask, new) where new has a row for each, x.masked_fill_(mask, value) where it is one number, "
    "torch.where(mask, new, x) where it has the shape of x",
    "unique": "count into a fixed number of bins: torch.zeros(bins, device=x.device).scatter_add_(0, x, ones)",
    "repeat_interleave": "pass output_size=, which is known before the step",
    "bincount": "count into a fixed number of bins: torch.zeros(bins, device=x.device).scatter_add_(0, x, ones)",
}
