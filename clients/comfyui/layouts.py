"""ComfyUI's layouts and a model's tensors.

AUDIO is ``{"waveform": float32 [batch, channels, samples], "sample_rate"}``, IMAGE float32 [batch,
height, width, channels] from 0 to 1, MASK float32 [batch, height, width], LATENT ``{"samples":
float32 [batch, channels, height, width]}``.
"""

from __future__ import annotations

import json
from typing import Any

from .daemon import NodeError
from .limits import TEXT_ITEMS_MAX

CHANNELS_MAX = 2  #: ComfyUI writes six channels as two without a word
COLOURS = (1, 3, 4)
UNBOUNDED = str(2**63 - 1)  #: the upper end of a range that has none


def to_tensor(value: Any, declared: dict[str, Any]) -> tuple[Any, int | None]:
    """Converts a node's input to what the method declares; also returns the sample rate of
    AUDIO. Values keep their meaning: an image's 0 to 1 become 0 to 255 in uint8, a sound's -1 to
    1 all of int16."""
    if isinstance(value, str):
        return _of_json(value, declared), None
    rate, low = None, 0
    if isinstance(value, dict) and "waveform" in value:
        value, rate, low = value["waveform"], int(value["sample_rate"]), -1
    elif isinstance(value, dict) and "samples" in value:
        value = value["samples"]
        if _is_integer(declared["dtype"]):
            raise NodeError(f"input {declared['name']} is LATENT, whose numbers have no bounds, and the model takes {describe(declared)}: connect another")
    if not hasattr(value, "detach"):
        raise NodeError(f"input {declared['name']} is a {type(value).__name__}: connect AUDIO, IMAGE, MASK or LATENT, or write numbers as JSON")
    tensor = value.detach().cpu()
    tensor = _of_rank(tensor, declared)
    if rate is None and tensor.dim() >= 3 and _colours_first(declared) and tensor.shape[-1] in COLOURS:
        tensor = tensor.movedim(-1, -3)
    return _of_dtype(tensor, declared, low).contiguous(), rate


def _of_json(text: str, declared: dict[str, Any]) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise NodeError(f"input {declared['name']} is not JSON ({error}): write numbers in nested lists, such as [[1, 2, 3]]") from None


def _of_rank(tensor: Any, declared: dict[str, Any]) -> Any:
    """Batches of one appear and disappear as the method needs; nothing else is dropped."""
    rank = len(declared["shape"])
    shape = list(tensor.shape)
    while tensor.dim() > rank and tensor.shape[0] == 1:
        tensor = tensor[0]
    while tensor.dim() < rank:
        tensor = tensor[None]
    if tensor.dim() != rank:
        raise NodeError(f"input {declared['name']} has shape {shape}, and the model takes {describe(declared)}: give one at a time, and one channel"
                        if shape[0] == 1 else
                        f"input {declared['name']} is a batch of {shape[0]}, and the model takes {describe(declared)}: give one at a time")  # fmt: skip
    return tensor


def _colours_first(declared: dict[str, Any]) -> bool:
    """[…, 3, height, width]."""
    sizes = [str(size).rsplit("=", 1)[-1] for size in declared["shape"]]
    return len(sizes) >= 3 and sizes[-3] in ("1", "3", "4") and sizes[-1] not in ("1", "3", "4")


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def _of_dtype(tensor: Any, declared: dict[str, Any], low: int) -> Any:
    """``low`` (0 or -1) to 1 become the whole range of an integer. An unsigned sound is silent in
    the middle of it, as in a WAV file of 8 bits; a signed one at 0."""
    import torch

    dtype = getattr(torch, declared["dtype"])
    if tensor.is_floating_point() and _is_integer(declared["dtype"]):
        limits = torch.iinfo(dtype)
        if limits.bits > 32:
            raise NodeError(f"input {declared['name']} takes {describe(declared)}, which has no bounds for {low} to 1: write numbers as JSON")
        half = (limits.max - limits.min + 1) // 2
        scale, middle = (limits.max, 0) if low == 0 else (half, limits.min + half)
        precise = tensor.double() if limits.bits > 16 else tensor.float()
        tensor = (precise.clamp(low, 1) * scale + middle).round().clamp(limits.min, limits.max)
    return tensor.to(dtype)


def describe(declared: dict[str, Any]) -> str:
    return f"{declared['dtype']}[{', '.join(str(size).removesuffix(UNBOUNDED) for size in declared['shape'])}]"


def audio(tensor: Any, rate: Any) -> dict[str, Any]:
    """AUDIO of samples [samples], [channels, samples] or [batch, channels, samples]."""
    if not isinstance(rate, int) or rate <= 0:
        raise NodeError(f"the model gave no sample rate ({rate!r}): its answer's values must have `sample_rate`")
    if tensor.dim() > 3 or tensor.dim() == 0 or not tensor.is_floating_point():
        raise NodeError(f"{_shown(tensor)} cannot be AUDIO (no sound): AUDIO has float samples, [samples] or [channels, samples]")
    waveform = tensor.reshape([1] * (3 - tensor.dim()) + list(tensor.shape)).float()
    if waveform.shape[1] > CHANNELS_MAX:
        raise NodeError(f"the model gave {waveform.shape[1]} channels, and ComfyUI keeps {CHANNELS_MAX}: let the model mix them")
    if waveform.shape[2] == 0:
        raise NodeError("the model gave no sound: try another text or seed")
    return {"waveform": waveform, "sample_rate": rate}


def image(tensor: Any) -> Any:
    """IMAGE of [height, width, colours], of batches of it, and of colours first."""
    if tensor.dim() not in (3, 4):
        raise NodeError(f"{_shown(tensor)} is not an IMAGE, which has three or four dimensions: use another output of the node")
    if tensor.shape[-1] not in COLOURS and tensor.shape[-3] in COLOURS:
        tensor = tensor.movedim(-3, -1)
    if tensor.shape[-1] not in COLOURS:
        raise NodeError(f"{_shown(tensor)} is not an IMAGE, which has 1, 3 or 4 colours: use another output of the node")
    tensor = _unit(tensor)
    return tensor.reshape([-1] + list(tensor.shape[-3:])).expand(-1, -1, -1, max(tensor.shape[-1], 3)).contiguous()


def mask(tensor: Any) -> Any:
    """MASK of [height, width], of batches of it, and of [batch, 1, height, width]."""
    if tensor.dim() == 4 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.dim() not in (2, 3):
        raise NodeError(f"{_shown(tensor)} is not a MASK, which has two or three dimensions: use another output of the node")
    return _unit(tensor).reshape([-1] + list(tensor.shape[-2:]))


def latent(tensor: Any) -> dict[str, Any]:
    """LATENT of [batch, channels, …]."""
    if tensor.dim() < 3 or not tensor.is_floating_point():
        raise NodeError(f"{_shown(tensor)} is not a LATENT, which has floats in three dimensions or more: use another output of the node")
    return {"samples": tensor.float()}


def _unit(tensor: Any) -> Any:
    return tensor.float() / 255 if str(tensor.dtype) == "torch.uint8" else tensor.float()


def as_json(values: dict[str, Any], tensors: dict[str, Any]) -> str:
    """Values, and tensors: small ones in full."""
    shown = {name: one.tolist() if one.numel() <= TEXT_ITEMS_MAX else _shown(one) for name, one in tensors.items()}
    return json.dumps({**values, **shown}, ensure_ascii=False)


def _shown(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
