"""What a method declares: how clients see it, and what of a request it refuses."""

from __future__ import annotations

import unittest
from typing import Any

from bulkhead.engine import Boolean, Choice, Integer, Number, Tensor, Text, method, methods_of
from bulkhead.errors import Error
from bulkhead.worker import messages
from bulkhead.worker.declaration import check_inputs, check_parameters, describe


class Voice:
    def load(self, context: Any) -> None:
        pass

    @method(
        inputs=[Tensor("x", "float32", ["n=1..4", 2]), Tensor("y", "int16", ["n=1..4"], optional=True, description="beside x")],
        parameters=[Text("text", multiline=True), Number("pitch", 100.0, low=0, high=200, step=0.5), Integer("count", 3, low=1),
                    Boolean("loud", False), Choice("voice", ["low", "high"]), Number("pace", 1.0, high=2)],
        outputs=[Tensor("audio", "float32", ["samples=0.."])],
    )  # fmt: skip
    def speak(self, **given: Any) -> Any:
        """Speaks it.

        And this is not told."""


METHODS = methods_of(Voice)
SPEAK = METHODS["speak"]


def sent(name: str, dtype: str, shape: tuple[int, ...]) -> messages.Tensor:
    return messages.Tensor(name, dtype, shape, messages.Lease(1, 0, 0, 1), 0)


X, Y = sent("x", "float32", (3, 2)), sent("y", "int16", (3,))


class Declared(unittest.TestCase):
    def test_it_is_told_as_it_is_written(self) -> None:
        self.assertEqual(describe(METHODS), {"speak": {
            "description": "Speaks it.",
            "inputs": [{"name": "x", "dtype": "float32", "shape": ["n=1..4", 2]},
                       {"name": "y", "dtype": "int16", "shape": ["n=1..4"], "optional": True, "description": "beside x"}],
            "parameters": [{"name": "text", "type": "string", "multiline": True},
                           {"name": "pitch", "type": "number", "default": 100.0, "minimum": 0, "maximum": 200, "step": 0.5},
                           {"name": "count", "type": "integer", "default": 3, "minimum": 1},
                           {"name": "loud", "type": "boolean", "default": False},
                           {"name": "voice", "type": "string", "default": "low", "choices": ["low", "high"]},
                           {"name": "pace", "type": "number", "default": 1.0, "maximum": 2}],
            "outputs": [{"name": "audio", "dtype": "float32", "shape": [f"samples=0..{2**63 - 1}"]}],
        }})  # fmt: skip

    def test_what_is_left_out_has_its_default_and_bounds_may_be_reached(self) -> None:
        defaults = {"text": "hi", "pitch": 100.0, "count": 3, "loud": False, "voice": "low", "pace": 1.0}
        self.assertEqual(check_parameters(SPEAK, {"text": "hi"}), defaults)
        for given in ({"pitch": 0}, {"pitch": 200}, {"count": 2**63 - 1}, {"loud": True}, {"voice": "high"}, {"pace": -1.5e308}):
            self.assertEqual(check_parameters(SPEAK, {"text": "hi", **given}), {**defaults, **given})
        self.assertIs(type(check_parameters(SPEAK, {"text": "hi", "pitch": 7})["pitch"]), float)

    def test_a_parameter_that_cannot_be_is_refused_and_the_remedy_told(self) -> None:
        for given, attempt, remedy in (
            ({"text": 1}, '"text" is an integer (1), declared is a string', "give a string"),
            ({"pitch": "high"}, '"pitch" is a string ("high"), declared is a number', "give a number"),
            ({"pitch": True}, '"pitch" is a boolean (true), declared is a number', "give a number"),
            ({"pitch": -0.5}, '"pitch" is -0.5', "give 0 to 200"),
            ({"pitch": 201}, '"pitch" is 201', "give 0 to 200"),
            ({"pace": 2.5}, '"pace" is 2.5', "give at most 2"),
            ({"pace": float("-inf")}, '"pace" is a number beyond 64 bits (-Infinity), declared is a number', "give a number"),
            ({"pace": -(10**400)}, '"pace" is an integer beyond 64 bits (-1000', "give a number"),
            ({"count": 0}, '"count" is 0', "give at least 1"),
            ({"count": 1.0}, '"count" is a number (1.0), declared is an integer', "give an integer"),
            ({"count": 2**63}, '"count" is an integer beyond 64 bits (9223372036854775808), declared is an integer', "give an integer"),
            ({"loud": 1}, '"loud" is an integer (1), declared is a boolean', "give a boolean"),
            ({"voice": "shrill"}, '"voice" is "shrill"', "give one of: low, high"),
            ({"voice": None}, '"voice" is null (null), declared is a string', "give a string"),
            ({"tempo": 1}, 'it takes no parameter "tempo"', "its parameters: text, pitch, count, loud, voice, pace"),
        ):
            with self.subTest(given), self.assertRaises(Error) as refused:
                check_parameters(SPEAK, {"text": "hi", **given})
            self.assertEqual((refused.exception.code, refused.exception.remedy), ("input_invalid", remedy))
            self.assertIn(f"calling speak: {'' if attempt.startswith('it ') else 'parameter '}{attempt}", refused.exception.attempt)
        with self.assertRaises(Error) as refused:
            check_parameters(SPEAK, {})
        self.assertIn('parameter "text" is missing', refused.exception.attempt)

    def test_inputs_that_cannot_be_are_refused_and_the_remedy_told(self) -> None:
        check_inputs(SPEAK, [X])
        check_inputs(SPEAK, [Y, X])
        for given, code, attempt, remedy in (
            ([Y], "input_invalid", 'input "x" is missing', "send float32 [n=1..4, 2]"),
            ([X, X], "input_invalid", 'input "x" came twice', "once"),
            ([X, sent("z", "float32", (3,))], "input_invalid", 'it takes no input "z"', "x, y"),
            ([sent("x", "float64", (3, 2))], "dtype_unsupported", 'input "x" is float64, declared is float32', "float32"),
            ([sent("x", "float32", (3,))], "shape_mismatch", "has rank 1 ([3]), declared is rank 2 ([n=1..4, 2])", "reshape"),
            ([sent("x", "float32", (5, 2))], "shape_mismatch", "has shape [5, 2], declared is [n=1..4, 2]", "declared ranges"),
            ([X, sent("y", "int16", (2,))], "shape_mismatch", 'inputs "x" and "y" share the dimension n: 3 and 2 came', "one size of n"),
        ):
            with self.subTest(attempt), self.assertRaises(Error) as refused:
                check_inputs(SPEAK, given)
            self.assertEqual(refused.exception.code, code)
            self.assertIn(attempt, refused.exception.attempt)
            self.assertIn(remedy, refused.exception.remedy)


if __name__ == "__main__":
    unittest.main()
