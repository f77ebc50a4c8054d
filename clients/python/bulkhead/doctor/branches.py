"""Which way a run goes where a value that is not known decides: the way of most runs. What an `if` guards is not run, unless its
`else` leaves (return, break, continue, raise); what is asserted holds; a loop goes around a few times."""

from __future__ import annotations

import ast

from .source import Place, statement_at

_ROUNDS = 2
_PATIENCE = 32  #: reads at one line, after which the other way is gone once: what ends a loop may be asked by a function that it calls
_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Raise)
_ENDING = (0, 1 << 30, -(1 << 30))  #: one of them ends a loop that compares a number


def truth(place: Place, count: int, otherwise: bool) -> bool:
    """Of a tensor that the statement asks; ``count`` reads at its line came before in this call. ``otherwise`` holds where the
    statement does not branch."""
    statement = statement_at(place.file, place.line)
    if isinstance(statement, ast.While):
        taken = count < _ROUNDS
    elif isinstance(statement, ast.If):
        taken = bool(statement.orelse) and isinstance(statement.orelse[-1], _LEAVES)
    elif isinstance(statement, ast.Assert):
        taken = True
    else:
        return otherwise
    if count % _PATIENCE == _PATIENCE - 1:
        taken = not taken
    test = statement.test
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        taken, test = not taken, test.operand
    return taken


def number(place: Place, count: int) -> int:
    """As `truth`, for a number that Python compares."""
    is_loop = isinstance(statement_at(place.file, place.line), ast.While)
    return 1 if not is_loop or count < _ROUNDS else _ENDING[(count - _ROUNDS) % len(_ENDING)]
