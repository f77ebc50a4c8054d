"""The worker link's messages, from ``worker_link.json``; the C++ side is generated from
the same file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..errors import Error

_SPEC: dict[str, Any] = json.loads((Path(__file__).parent.parent / "worker_link.json").read_text("utf-8"))

VERSION: int = _SPEC["version"]
PACKET_BYTES_MAX: int = _SPEC["limits"]["packet_bytes_max"]
PACKET_FDS_MAX: int = _SPEC["limits"]["packet_fds_max"]
#: Of the page that a worker shares with the daemon: ``bytes``, ``magic``, ``members``.
PAGE: dict[str, Any] = _SPEC["page"]
_OBJECTS: dict[str, Any] = _SPEC["objects"]
_RANGES = {"u32": (0, (1 << 32) - 1), "u64": (0, (1 << 64) - 1), "i32": (-(1 << 31), (1 << 31) - 1), "i64": (-(1 << 63), (1 << 63) - 1)}


def encode(kind: str, **members: Any) -> bytes:
    """Raises ``TypeError`` for an undefined member."""
    known = {member[0] for member in _SPEC["to_daemon"][kind]["members"]}
    if unknown := members.keys() - known:
        raise TypeError(f"{kind} has no {', '.join(sorted(unknown))}")
    present = {name: value for name, value in members.items() if value is not None}
    return json.dumps({"type": kind, **present}, separators=(",", ":")).encode()


def parse(data: bytes) -> tuple[str, dict[str, Any]]:
    """Returns type and members of a message from the daemon; an absent member, or one of another
    type, is empty. Raises ``protocol_violation`` if it is not a message of this link."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Error("protocol_violation", f"a packet that is not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise Error("protocol_violation", "a packet without a type")
    kind = message["type"]
    spec = _SPEC["to_worker"].get(kind)
    if spec is None:
        raise Error("protocol_violation", f"unknown type {kind[:64]!a}")
    members = {name: _typed(form, message.get(name)) for name, form, *_ in spec["members"]}
    for name in spec.get("required", ()):
        form = next(form for known, form, *_ in spec["members"] if known == name)
        if not _fits(form.rstrip("?"), message.get(name)):
            raise Error("protocol_violation", f"{kind} without {name}")
    return kind, members


def unread(fate: str) -> frozenset[str]:
    """The messages to the daemon that are ``dropped``, or ``kept``, while it does not read."""
    return frozenset(kind for kind, spec in _SPEC["to_daemon"].items() if spec.get("unread") == fate)


def descriptors(kind: str) -> int:
    """Number of descriptors that come with a message to the worker."""
    return int(_SPEC["to_worker"].get(kind, {}).get("fds", 0))


def _fits(form: str, value: Any) -> bool:
    base, suffix = re.fullmatch(r"(\w+)(\[\d*\])?", form).groups()  # type: ignore[union-attr]
    if suffix:
        length = suffix[1:-1]
        return isinstance(value, list) and (not length or len(value) == int(length)) and all(_fits(base, item) for item in value)
    if base in _RANGES:
        low, high = _RANGES[base]
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    if base == "bool":
        return isinstance(value, bool)
    return isinstance(value, str) if base == "text" else isinstance(value, dict)


def _typed(form: str, value: Any) -> Any:
    optional = form.endswith("?")
    form = form.rstrip("?")
    if _fits(form, value):
        return value
    if optional:
        return None
    if form.endswith("]"):
        return []
    if form in _OBJECTS or form == "object":
        return {}
    return {"bool": False, "text": ""}.get(form, 0)
