"""Describes an engine's methods for the welcome, and checks each request against
the description."""

from __future__ import annotations

import json
import sys
from typing import Any, Callable, Iterable, Mapping, Sequence

from ..engine import UNBOUNDED, Boolean, Choice, Dim, Integer, Method, Number, Parameter, Tensor, Text
from ..errors import Error
from . import messages

_METHODS_SHOWN_MAX = 16
_INTEGER_MIN, _INTEGER_MAX = -(1 << 63), (1 << 63) - 1
_TYPE = {Text: "string", Number: "number", Integer: "integer", Boolean: "boolean", Choice: "string"}


def describe(methods: Mapping[str, Method]) -> dict[str, Any]:
    """The JSON for the welcome, ``ready`` and ``bulkhead info --model``."""
    return {name: _present(_method(method)) for name, method in methods.items()}


def _method(method: Method) -> dict[str, Any]:
    return {
        "inputs": [_tensor(tensor) for tensor in method.inputs],
        "parameters": [_parameter(parameter) for parameter in method.parameters],
        "outputs": [_tensor(tensor) for tensor in method.outputs],
        "description": method.description,
        "streams": method.streams,
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    shape = [dim.low if dim.low == dim.high and not dim.name else str(dim) for dim in tensor.dims]
    return _present({"name": tensor.name, "dtype": tensor.dtype, "shape": shape, "optional": tensor.optional, "description": tensor.description})


def _parameter(parameter: Parameter) -> dict[str, Any]:
    one: dict[str, Any] = {"name": parameter.name, "type": _TYPE[type(parameter)]}
    if parameter.default is not None:
        one["default"] = float(parameter.default) if isinstance(parameter, Number) else parameter.default
    if isinstance(parameter, (Number, Integer)):
        one |= {"minimum": parameter.low, "maximum": parameter.high, "step": parameter.step}
    if isinstance(parameter, Choice):
        one["choices"] = list(parameter.choices)
    if isinstance(parameter, Text):
        one["multiline"] = parameter.multiline
    one["description"] = parameter.description
    return {key: value for key, value in one.items() if key in ("name", "type", "default") or not (value is None or value is False or value == "")}


def _present(members: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in members.items() if value not in (False, "")}


def find(methods: Mapping[str, Method], name: str) -> Method:
    if name not in methods:
        raise Error("method_unknown", f'calling method "{name}"', "call one of: " + ", ".join(list(methods)[:_METHODS_SHOWN_MAX]))
    return methods[name]


def check_inputs(method: Method, inputs: Sequence[messages.Tensor]) -> None:
    """Checks names, dtypes and shapes; dimensions of one name must have one size."""
    declared = {tensor.name: tensor for tensor in method.inputs}
    for given in inputs:
        if given.name not in declared:
            raise _invalid(method, f'it takes no input "{given.name}"', f"its inputs: {_names(declared)}")
    sizes: dict[str, tuple[str, int]] = {}
    for tensor in method.inputs:
        found = [given for given in inputs if given.name == tensor.name]
        if not found and tensor.optional:
            continue
        if not found:
            raise _invalid(method, f'input "{tensor.name}" is missing', f"send {tensor.dtype} {_shape(tensor.dims)}")
        if len(found) > 1:
            raise _invalid(method, f'input "{tensor.name}" came twice', "send each input once")
        _check_tensor(f'calling {method.name}: input "{tensor.name}"', tensor, found[0].dtype, found[0].shape)
        for dim, size in zip(tensor.dims, found[0].shape):
            first, same = sizes.setdefault(dim.name, (tensor.name, size)) if dim.name else ("", size)
            if same != size:
                raise Error("shape_mismatch",
                            f'calling {method.name}: inputs "{first}" and "{tensor.name}" share the dimension {dim.name}: {same} and {size} came',
                            f"send them with one size of {dim.name}, padded where one is shorter")  # fmt: skip


def _check_tensor(what: str, declared: Tensor, dtype: str, shape: Sequence[int]) -> None:
    if dtype != declared.dtype:
        raise Error("dtype_unsupported", f"{what} is {dtype}, declared is {declared.dtype}", f"send {declared.dtype}")
    if len(shape) != len(declared.dims):
        raise Error("shape_mismatch", f"{what} has rank {len(shape)} ({list(shape)}), declared is rank {len(declared.dims)} ({_shape(declared.dims)})",
                    "reshape it")  # fmt: skip
    if not all(dim.low <= size <= dim.high for dim, size in zip(declared.dims, shape)):
        raise Error("shape_mismatch", f"{what} has shape {list(shape)}, declared is {_shape(declared.dims)}",
                    "send a shape within the declared ranges, or widen them where the model allows it")  # fmt: skip


def check_output(method: Method, declared: Tensor, dtype: str, shape: Sequence[int]) -> None:
    """Checks an engine's output against its own declaration."""
    try:
        _check_tensor(f'output "{declared.name}" of {method.name}', declared, dtype, shape)
    except Error as error:
        raise Error("inference_failed", error.attempt, "the engine's declaration and what it returns differ") from None


def check_parameters(method: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a value for each parameter, of its type and within its bounds."""
    declared = {parameter.name: parameter for parameter in method.parameters}
    for name in given:
        if name not in declared:
            raise _invalid(method, f'it takes no parameter "{name}"', f"its parameters: {_names(declared)}")
    values: dict[str, Any] = {}
    for name, parameter in declared.items():
        article = _article(_TYPE[type(parameter)])
        if name not in given:
            if parameter.default is None:
                raise _invalid(method, f'parameter "{name}" is missing', f"give it, {article}, or declare a default")
            values[name] = parameter.default
            continue
        value = given[name]
        if not _READABLE[type(parameter)](value):
            raise _invalid(method, f'parameter "{name}" is {_kind(value)} ({_short(value)}), declared is {article}', f"give {article}")
        values[name] = float(value) if isinstance(parameter, Number) else value
        _check_bounds(method, parameter, value)
    return values


def _check_bounds(method: Method, parameter: Parameter, value: Any) -> None:
    if isinstance(parameter, Choice) and value not in parameter.choices:
        raise _invalid(method, f'parameter "{parameter.name}" is {_short(value)}', "give one of: " + ", ".join(parameter.choices))
    if isinstance(parameter, (Number, Integer)):
        low, high = parameter.low, parameter.high
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"{low} to {high}" if low is not None and high is not None else f"at least {low}" if low is not None else f"at most {high}"
            raise _invalid(method, f'parameter "{parameter.name}" is {_short(value)}', f"give {bounds}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and _INTEGER_MIN <= value <= _INTEGER_MAX


def _is_number(value: Any) -> bool:
    """JSON has numbers beyond a float: 1e999 is read as infinity."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_READABLE: dict[type, Callable[[Any], bool]] = {
    Text: _is_text, Choice: _is_text, Integer: _is_integer, Number: _is_number, Boolean: lambda value: isinstance(value, bool),
}  # fmt: skip


def _invalid(method: Method, what: str, remedy: str) -> Error:
    return Error("input_invalid", f"calling {method.name}: {what}", remedy)


def _names(declared: Iterable[str]) -> str:
    return ", ".join(declared) or "none"


def _shape(dims: Sequence[Dim]) -> str:
    """An unbounded range has no upper end, as in the engine's declaration."""
    return "[" + ", ".join(str(dim).removesuffix(str(UNBOUNDED)) for dim in dims) + "]"


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "integer" else f"a {kind}"


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object"}
    is_beyond = type(value) is int and not _is_integer(value) or type(value) is float and not _is_number(value)
    return "null" if value is None else kinds[type(value)] + (" beyond 64 bits" if is_beyond else "")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 64 else text[:61] + "..."
