"""The menus of models. Without a daemon they say what is needed: a menu is made whenever ComfyUI
looks at a node."""

from __future__ import annotations

import logging
from typing import Any

from . import daemon, fleet_file, form, learnt
from .limits import LOOK_AGE_SECONDS


def models() -> list[str]:
    """Returns the fleet's models, or one entry that says why there are none."""
    try:
        found = list(dict.fromkeys(row["model"] for row in daemon.rows(age=LOOK_AGE_SECONDS)))
        return found or ["(the fleet file names no model)"]
    except Exception as error:  # whatever it is, ComfyUI's page must open
        return [f"({error})"]


def any_method() -> Any:
    """Returns an entry for each method: ``model``, or ``model/method`` if the model has several."""
    from comfy_api.latest import IO

    options = []
    for model, methods in _methods().items():
        for name, method in methods.items():
            options.append(IO.DynamicCombo.Option(model if len(methods) == 1 else f"{model}/{name}", form.fields(method)))
        if not methods:
            options.append(IO.DynamicCombo.Option(model, []))
    return IO.DynamicCombo.Input("model", options=options, tooltip=HINT)


HINT = "A model that never ran, of an engine that is not Bulkhead's own, has few fields: load it once, then press R."


def _methods() -> dict[str, dict[str, Any]]:
    """Returns the methods of each model, as its worker last described them, else as an engine of
    Bulkhead declares them."""
    found = {model: learnt.methods(model) for model in models()}
    try:
        if not all(found.values()):
            from bulkhead.engines import declared

            daemon.rows(age=LOOK_AGE_SECONDS)  # raises at once for a daemon that has just hung
            _, told = fleet_file.read()
            found |= {model: declared(str(told[model].get("engine"))).get("methods", {}) for model in found if model in told and not found[model]}
    except Exception as error:  # as in models()
        logging.debug("Bulkhead: the engines' declarations are not known: %s", error)
    return found


def of_method(name: str, text: str, apart: tuple[str, ...]) -> Any:
    """Returns models with that method, and models whose methods are unknown, with its parameter
    ``text``, on which the node relies. ``apart``: inputs that the node has itself."""
    from comfy_api.latest import IO

    known = {"inputs": [], "parameters": [{"name": text, "type": "string", "multiline": True}]}
    options = []
    for model, methods in _methods().items():
        if name in methods or not methods:
            method = methods.get(name, known)
            inputs = [one for one in method["inputs"] if one["name"] not in apart]
            parameters = [one for one in method["parameters"] if one["name"].removesuffix("_rate") not in apart]
            options.append(IO.DynamicCombo.Option(model, form.fields({"inputs": inputs, "parameters": parameters})))
    return IO.DynamicCombo.Input("model", options=options or [IO.DynamicCombo.Option(f"(no model has a method {name!r})", [])], tooltip=HINT)
