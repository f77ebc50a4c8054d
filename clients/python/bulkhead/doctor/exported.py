"""Runs an exported program (.pt2) node by node; each node knows its source line."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..errors import Error
from .source import Location, as_if, is_users, line_location, one_line

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


class Program:
    """Callable as the exported function was. Errors: input_invalid for a file that is not an
    exported program."""

    def __init__(self, file: Path) -> None:
        self.__qualname__, self._file = file.name, str(file)
        if not file.is_file():
            raise Error("input_invalid", f"TARGET: there is no file {file}", "name a file that torch.export.save wrote")
        logging.disable(logging.WARNING)  # torch logs a traceback before it raises
        try:
            self._program = torch.export.load(file)
        except Exception as error:
            raise Error("input_invalid", f"reading {file}: {one_line(str(error) or type(error).__name__, 200)}",
                        "name a file that torch.export.save wrote; a compiled package holds no operators to look at"
                        ) from None  # fmt: skip
        finally:
            logging.disable(logging.NOTSET)

    def inputs(self, device: str) -> Any:
        if self._program.example_inputs is None:
            raise Error("input_invalid", f"{self.__qualname__} keeps no example inputs", "give --inputs")
        args, kwargs = self._program.example_inputs
        return tree_map(lambda one: one.to(device) if isinstance(one, torch.Tensor) else one, (*args, *kwargs.values()))

    def steps(self, given: tuple[tuple[Any, ...], dict[str, Any]], device: str) -> list[Any]:
        from torch.export.passes import move_to_device_pass

        module = move_to_device_pass(self._program, device).module()
        interpreter = _Lines(module)
        interpreter.file = self._file
        return [(lambda *args, **kwargs: interpreter.run(*args, *kwargs.values()), *given)]


class _Lines(torch.fx.Interpreter):  # type: ignore[misc]
    file = ""

    def run_node(self, node: Any) -> Any:
        with as_if(location_in(node.meta.get("stack_trace") or "") or Location(self.file, 0, 0, 0, node.name)):
            return super().run_node(node)


def location_in(stack: str) -> Location | None:
    """The innermost user line in a stack trace's text."""
    frames = [(file, int(line), name) for file, line, name in _FRAME.findall(stack) if is_users(file)]
    if not frames:
        return None
    return line_location(*frames[-1], tuple(f"{one}:{at} {called}" for one, at, called in frames[:-1]))
