"""Gives back what it gets, for the bench "engines"."""

from typing import Any

from bulkhead.engine import Context, Result, Tensor, method

_SOUND: list[int | str] = ["channels=1..2", "samples=1.."]
_IMAGE: list[int | str] = ["count=1..", "height=1..", "width=1..", 3]


class Echo:
    """Gives back what it gets."""

    def load(self, context: Context) -> None:
        pass

    @method(inputs=[Tensor("x", "float32", _SOUND)], outputs=[Tensor("out", "float32", _SOUND)])
    def sound(self, *, x: Any) -> Result:
        return Result(out=x)

    @method(inputs=[Tensor("x", "float32", _IMAGE)], outputs=[Tensor("out", "float32", _IMAGE)])
    def image(self, *, x: Any) -> Result:
        return Result(out=x)
