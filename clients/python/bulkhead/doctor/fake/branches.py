"""Chooses a run's path when an unknown value decides: the path of most runs. The body of an `if`
is skipped, unless its `else` leaves (return, break, continue, raise); an assertion holds; a loop
runs a few times."""

from __future__ import annotations

import ast
import inspect
from types import FrameType
from typing import Iterator

from ..source import Location, absolute, around, expression_at, frames, function_around, parsed, statement_of

_ROUNDS = 2
#: Reads at one line in a loop, after which the value that may end it is returned: the read may be
#: in a called function.
_PATIENCE = 32
_CALLERS_MAX = 4  #: functions on the stack whose comparisons are examined
_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Raise)
_MEMBERS_MAX = 8  #: of a list that a number is looked for in
_ENDING = (0, 1 << 30, -(1 << 30))  #: one of them ends a loop that compares a number


def truth(location: Location, count: int, otherwise: bool) -> bool:
    """The truth of a tensor in a condition; ``count`` reads at its line came before in this call.
    ``otherwise`` is returned if the statement does not branch."""
    statement = statement_of(location)
    if isinstance(statement, ast.While):
        taken = count < _ROUNDS
    elif isinstance(statement, ast.If):
        taken = bool(statement.orelse) and isinstance(statement.orelse[-1], _LEAVES)
    else:
        taken = isinstance(statement, ast.Assert) or otherwise
    refuses = isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise) or isinstance(statement, ast.Assert)
    if count % _PATIENCE == _PATIENCE - 1 and not refuses and _in_loop():
        taken = not taken
    return taken != (isinstance(statement, (ast.If, ast.While, ast.Assert)) and _is_inverted(location))


def _is_inverted(location: Location) -> bool:
    """Whether the statement tests the opposite of the location's value: `not` stands before it."""
    inverted = False
    node: ast.AST | None = expression_at(location)
    while isinstance(node, ast.expr):
        inverted ^= isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        node = parsed(location.file).parents.get(node)
    return inverted


def number(location: Location, count: int) -> int | float:
    """As `truth`, for a number that Python compares."""
    if isinstance(statement_of(location), ast.While):
        return 1 if count < _ROUNDS else _ENDING[(count - _ROUNDS) % len(_ENDING)]
    return (ending(count) if is_long(count) else None) or 1


def is_long(count: int) -> bool:
    """Whether a line was read so often that an assumed value seems to keep a loop from ending."""
    return count >= _PATIENCE


def ending(count: int) -> int | float | None:
    """A number that may end the loop around the read: one that the functions on the stack compare
    with, in turn. Each is returned twice, because two reads of a line may be compared. None outside
    `while` loops."""
    if not _in_loop(ast.While):
        return None
    asked = list(dict.fromkeys([*_compared(), *_ENDING[:1]]))
    return asked[(count // 2) % len(asked)]


def _in_loop(*kinds: type[ast.AST]) -> bool:
    return any(isinstance(node, kinds or (ast.While, ast.For, ast.AsyncFor)) for frame in frames() for node in _of(frame))


def _of(frame: FrameType) -> Iterator[ast.AST]:
    """The running statement, and its enclosing nodes up to its function."""
    for node in around(absolute(frame.f_code.co_filename), frame.f_lineno):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        yield node


def _compared() -> Iterator[int | float]:
    for frame in frames()[:_CALLERS_MAX]:
        function = function_around(absolute(frame.f_code.co_filename), frame.f_lineno)
        for node in ast.walk(function) if function is not None else ():
            if isinstance(node, ast.Compare):
                for operand in (node.left, *node.comparators):
                    value = _value(operand, frame)
                    for one in list(value)[:_MEMBERS_MAX] if isinstance(value, (list, tuple, set, frozenset)) else [value]:
                        if isinstance(one, (int, float)) and not isinstance(one, bool):
                            yield from (one, one - 1, one + 1)


def _value(operand: ast.expr, frame: FrameType) -> object:
    """The value of a literal, a name, or an attribute, without running user code. Else None."""
    if isinstance(operand, ast.Constant):
        return operand.value
    if isinstance(operand, (ast.Tuple, ast.List, ast.Set)):
        return [_value(one, frame) for one in operand.elts]
    if isinstance(operand, ast.Name):
        return frame.f_locals.get(operand.id, frame.f_globals.get(operand.id))
    if isinstance(operand, ast.Attribute):
        return inspect.getattr_static(_value(operand.value, frame), operand.attr, None)
    return None
