"""Finds settings that hide lost graphs: those a run makes, those in the source, and those still
set. Also finds caches used by the names of their attributes."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import re
import sys
from typing import Any, Callable, Iterator
from unittest import mock

import torch
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor
from torch.utils._config_module import ConfigModule

from . import findings
from .coverage import Executed, nodes
from .findings import Findings
from .source import Location, frames, here, is_standard, node_location

#: Settings of `torch._dynamo.config` and `torch._inductor.config`, and what each one hides.
HIDING = {
    "suppress_errors": "compile errors then fall back to eager code, silently",
    "capture_scalar_outputs": "`.item()` then no longer breaks the compiled graph, but the host still reads the value and CUDA "
                              "Graphs are skipped",
    "capture_dynamic_output_shape_ops": "shapes that depend on data no longer break the compiled graph, but CUDA Graphs are "
                                        "skipped",
    "disable": "nothing is compiled",
    "cache_size_limit": "recompilations are allowed to go on",
    "recompile_limit": "recompilations are allowed to go on",
    "accumulated_cache_size_limit": "recompilations are allowed to go on",
    "accumulated_recompile_limit": "recompilations are allowed to go on",
    "cudagraph_skip_dynamic_graphs": "graphs of dynamic shapes are skipped without a word",
    "cudagraph_dynamic_shape_warn_limit": "the warning about many graphs is turned off",
}
#: Environment variables, and what each one hides.
VARIABLES = {
    "TORCHDYNAMO_SUPPRESS_ERRORS": HIDING["suppress_errors"],
    "TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS": HIDING["capture_scalar_outputs"],
    "TORCHDYNAMO_CAPTURE_DYNAMIC_OUTPUT_SHAPE_OPS": HIDING["capture_dynamic_output_shape_ops"],
    "TORCHDYNAMO_DISABLE": HIDING["disable"],
    "TORCH_COMPILE_DISABLE": HIDING["disable"],
    "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each allocation calls cudaMalloc, which a capture refuses",
}
_BETWEEN = (torch.utils._config_module.__file__, __file__)
_REMEDY = "remove it while you look for what breaks capture, and correct that"
_CACHE = re.compile(r"cache|past|kv", re.IGNORECASE)
_IS_CACHE = re.compile(r"\w*cache|past|\w*past_(kv|key_value)s?")  #: the name of one
_CACHE_NAMES = frozenset(
    "reset key_cache value_cache _key_cache _value_cache get_seq_length get_max_length get_max_cache_shape crop layers "
    "seen_tokens".split()
)
_PRIVATE = frozenset(("_key_cache", "_value_cache", "_seen_tokens"))
_WORDS = re.compile(
    rf"\b({'|'.join(HIDING)})\s*=|{'|'.join((*VARIABLES, *_PRIVATE))}|__new__|attr\([^\n]*(cache|past|kv)", re.IGNORECASE
)


def scan(found: Findings, executed: Executed) -> None:
    for file, lines in list(executed.items()):
        suspects, called = _suspects(file, "".join(linecache.getlines(file)))
        for node, function in suspects:
            if node.lineno in lines or not function:
                for code, severity, reason, remedy in _told(node, lambda name: (function, name) in called):
                    found.add(code, severity, node_location(file, node, function), reason, remedy)


@functools.lru_cache(maxsize=None)
def _suspects(file: str, source: str) -> tuple[list[tuple[Any, str]], set[tuple[str, str]]]:
    """The nodes of a file that `_told` looks at, and the methods that each function calls. An
    engine's load executes hundreds of files."""
    if not _WORDS.search(source):
        return [], set()
    suspects = [(node, function) for node, function in nodes(file) if isinstance(node, (ast.Assign, ast.Attribute, ast.Call))]
    called = {(function, node.func.attr) for node, function in suspects
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}  # fmt: skip
    return suspects, called


@contextlib.contextmanager
def watched(found: Findings) -> Iterator[None]:
    """Watches the settings that user code makes meanwhile, in any form: by another name, setattr,
    patch, update."""

    def set_config(config: Any, name: str, value: Any) -> None:
        hides = HIDING.get(name.split(".")[-1])
        if hides and value and value != _default(config, name) and _is_set_by_user():
            _add(found, f"`{name}` is set: {hides}")
        before_config(config, name, value)

    def set_variable(environ: Any, name: str, value: str) -> None:
        if environ is os.environ and name in VARIABLES and value not in ("0", "") and _is_set_by_user():
            _add(found, f"the environment variable {name} is set: {VARIABLES[name]}")
        before_variable(environ, name, value)

    before_config, before_variable = ConfigModule.__setattr__, type(os.environ).__setitem__
    with (
        mock.patch.object(ConfigModule, "__setattr__", set_config),
        mock.patch.object(type(os.environ), "__setitem__", set_variable),
    ):
        yield


def _is_set_by_user() -> bool:
    """Whether user code sets it: not PyTorch, which sets some temporarily, nor the doctor."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (frame.f_code.co_filename in _BETWEEN or is_standard(frame.f_code.co_filename)):
        frame = frame.f_back
    return bool(frames()) and frame in frames()


def _add(found: Findings, reason: str) -> None:
    if (location := here()) is not None:
        found.add(findings.HIDDEN_SETTING, findings.SLOW, location, reason, _REMEDY)


def _default(config: Any, name: str) -> Any:
    entry = config._config.get(name)
    if entry is None or entry.alias is None:
        return getattr(entry, "default", None)
    module, _, aliased = entry.alias.rpartition(".")
    return _default(sys.modules[module], aliased)


def left(found: Findings, target: Location) -> None:
    """Reports hiding settings without a finding: code that did not run here made them
    before the run."""
    told = " ".join(one.reason for one in found.sorted() if one.code == findings.HIDDEN_SETTING)
    for config in (dynamo, inductor):
        for name, entry in config._config.items():
            hides = HIDING.get(name.split(".")[-1])
            if hides is None or entry.alias is not None:
                continue
            value = getattr(config, name)
            names = [name, *(one for one, other in config._config.items() if other.alias == f"{config.__name__}.{name}")]
            if value and value != entry.default and not any(f"{one}`" in told for one in names):
                reason = f"`{config.__name__}.{name}` is {value!r}, and was set before this ran: {hides}"
                found.add(findings.HIDDEN_SETTING, findings.SLOW, target, reason, _REMEDY)


def environment(found: Findings) -> None:
    for name, hides in VARIABLES.items():
        if os.environ.get(name, "0") not in ("0", ""):
            location = Location("environment", 0, 0, 0, name)
            found.add(findings.HIDDEN_SETTING, findings.SLOW, location, f"{name} is set: {hides}", f"unset {name}")


_Told = tuple[str, str, str, str]


def _told(node: ast.AST, is_called: Callable[[str], bool]) -> Iterator[_Told]:
    """``is_called``: whether the function that has the node calls a method of this name."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _setting(target, node.value)
    elif isinstance(node, ast.Attribute) and node.attr in _PRIVATE and _CACHE.search(ast.unparse(node.value)):
        yield (findings.DUCK_TYPED_CACHE, findings.STALE,
               f"`{ast.unparse(node)}` is a private attribute of a cache, which other releases name otherwise",
               "use the cache's methods; for graphs a StaticCache, whose tensors keep their addresses")  # fmt: skip
    elif isinstance(node, ast.Call):
        yield from _call(node, is_called)


def _setting(target: ast.expr, value: ast.expr) -> Iterator[_Told]:
    if isinstance(value, ast.Constant) and not value.value:
        return
    text = ast.unparse(target)
    if isinstance(target, ast.Attribute) and target.attr in HIDING and "config" in text:
        yield findings.HIDDEN_SETTING, findings.SLOW, f"`{text}` is set: {HIDING[target.attr]}", _REMEDY
    if isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith("environ"):
        if isinstance(target.slice, ast.Constant):
            yield from _variable(str(target.slice.value), value)


def _variable(name: str, value: ast.expr) -> Iterator[_Told]:
    if name in VARIABLES and not (isinstance(value, ast.Constant) and str(value.value) in ("0", "")):
        yield findings.HIDDEN_SETTING, findings.SLOW, f"the environment variable {name} is set: {VARIABLES[name]}", _REMEDY


def _call(node: ast.Call, is_called: Callable[[str], bool]) -> Iterator[_Told]:
    called = ast.unparse(node.func)
    arguments = [ast.unparse(argument) for argument in node.args]
    if called.endswith(("config.patch", "config.update")):
        for keyword in node.keywords:
            if keyword.arg in HIDING and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                yield findings.HIDDEN_SETTING, findings.SLOW, f"`{keyword.arg}` is set: {HIDING[keyword.arg]}", _REMEDY
    if called.endswith(("environ.setdefault", "os.putenv")) and len(node.args) == 2 and isinstance(node.args[0], ast.Constant):
        yield from _variable(str(node.args[0].value), node.args[1])
    if called in ("hasattr", "getattr") and len(node.args) >= 2 and isinstance(node.args[1], ast.Constant):
        name = str(node.args[1].value)
        is_method = called == "hasattr" and is_called(name) and _IS_CACHE.fullmatch(_last_name(node.args[0])) is not None
        if is_method or name in _CACHE_NAMES and _CACHE.search(arguments[0]):
            yield (findings.DUCK_TYPED_CACHE, findings.STALE,
                   f"`{called}` asks a cache for {node.args[1].value!r}: a cache of another class, or of another "
                   "release, is passed over silently and keeps old keys",
                   "ask for the class: isinstance(cache, StaticCache), and call its method")  # fmt: skip
    if called.endswith("__new__") and arguments and (_CACHE.search(arguments[0]) or _CACHE.search(called)):
        yield (findings.DUCK_TYPED_CACHE, findings.STALE,
               f"`{called}` makes a cache without its __init__: attributes that its methods need are missing",
               "call the constructor; for graphs use a StaticCache, whose tensors keep their addresses")  # fmt: skip


def _last_name(node: ast.expr) -> str:
    """`cache` of `self.cache[0]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
