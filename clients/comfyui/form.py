"""Fields of a node, made from what a method declares, and a request made from their values."""

from __future__ import annotations

from typing import Any

from . import layouts
from .daemon import NodeError

INTEGER_MAX = 2**53 - 1  #: what a browser's numbers hold


def fields(method: dict[str, Any]) -> list[Any]:
    """Returns a field for each parameter and each input, except rates that come with an AUDIO."""
    rates = {f"{one['name']}_rate" for one in method["inputs"]}
    return [*map(_input, method["inputs"]), *(_parameter(one) for one in method["parameters"] if one["name"] not in rates)]


def _input(declared: dict[str, Any]) -> Any:
    from comfy_api.latest import IO

    tip = ". ".join(filter(None, [declared.get("description"), layouts.describe(declared)]))
    numbers = IO.String.Input(declared["name"], default="", optional=True, tooltip=tip, placeholder="numbers as JSON, or connect")
    return IO.MultiType.Input(numbers, types=[IO.Audio, IO.Image, IO.Mask, IO.Latent])


def _parameter(declared: dict[str, Any]) -> Any:
    from comfy_api.latest import IO

    name, default = declared["name"], declared.get("default")
    common = {"optional": "default" in declared, "tooltip": declared.get("description")}
    if declared["type"] == "boolean":
        return IO.Boolean.Input(name, default=bool(default), **common)
    if declared["type"] == "string" and declared.get("choices"):
        return IO.Combo.Input(name, options=list(declared["choices"]), default=default, **common)
    if declared["type"] == "string":
        return IO.String.Input(name, default=default or "", multiline=bool(declared.get("multiline")), **common)
    low, high, step = declared.get("minimum"), declared.get("maximum"), declared.get("step")
    if declared["type"] == "integer":
        low, high = (-INTEGER_MAX if low is None else low), (INTEGER_MAX if high is None else min(high, INTEGER_MAX))
        return IO.Int.Input(name, default=default if default is not None else max(low, 0), min=low, max=high, step=step or 1, **common)
    return IO.Float.Input(name, default=float(default or 0), min=-1e9 if low is None else low, max=1e9 if high is None else high,
                          step=step or 0.01, **common)  # fmt: skip


def chosen(inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the model and the values of its fields. ComfyUI nests the form's fields. It gives
    fields of a workflow that was made before the form was known as ``model.text``."""
    given = inputs.get("model")
    values = dict(given) if isinstance(given, dict) else {"model": given}
    key = values.pop("model", None)
    values.update((field.removeprefix("model."), value) for field, value in inputs.items() if field.startswith("model."))
    if not isinstance(key, str) or not key:
        raise NodeError("no model is chosen: choose one, and press R if the menu has none")
    return key, {field: value for field, value in values.items() if value is not None}


def request(method: dict[str, Any], values: dict[str, Any], *, of: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Makes tensors and parameters from the fields' values. ``of``: the model and its
    method, for errors."""
    inputs = {one["name"]: one for one in method["inputs"]}
    parameters = {one["name"]: one for one in method["parameters"]}
    tensors: dict[str, Any] = {}
    told: dict[str, Any] = {}
    for name, value in values.items():
        if name in inputs and not (isinstance(value, str) and not value.strip()):
            tensors[name], rate = layouts.to_tensor(value, inputs[name])
            if rate is not None and f"{name}_rate" in parameters:
                told[f"{name}_rate"] = rate
        elif name in parameters:
            told[name] = value
        elif name not in inputs:
            raise NodeError(f"{of} has no field {name!r}: it has {', '.join([*inputs, *parameters])}. Press R, and choose the model again")
    missing = [name for name, one in inputs.items() if not one.get("optional") and name not in tensors]
    missing += [name for name, one in parameters.items() if "default" not in one and name not in told]
    if missing:
        raise NodeError(f"{of} also needs {', '.join(missing)}: connect or fill them in")
    return tensors, told
