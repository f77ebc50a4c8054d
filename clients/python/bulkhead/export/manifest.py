"""manifest.json: a package's description. Writes it, reads it back, and checks it before anything
is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import Error

FORMAT = "bulkhead-generate/1"
FILE = "manifest.json"

#: Required members, except the OPTIONAL, and their types; None: may be null.
MEMBERS: dict[str, tuple[type | None, ...]] = {
    "format": (str,), "family": (str,), "name": (str,), "exporter": (str,), "torch": (str,), "device": (str,),
    "compute_capability": (str, None), "cpu_flags": (list,), "dtypes": (dict,), "vocabulary": (int,), "codebooks": (int,),
    "rows": (int,), "length_max": (int,), "length": (int,), "slots": (int,), "slots_max": (int,), "buckets": (list,),
    "kv": (dict,), "prefill": (dict,), "decode": (list,), "rope_delta": (bool, str), "first_token": (list, None), "stop": (list,),
    "bos": (int, None), "delay_pattern": (dict, None), "sampling": (dict,), "sampling_order": (str,), "methods": (list,), "weights": (dict,),
    "constants": (dict,), "tokenizer": (list,), "source": (dict,), "functions": (dict,),
}  # fmt: skip
OPTIONAL = ("functions",)  #: missing in packages of earlier exporters


def read(folder: Path) -> dict[str, Any]:
    """Errors: input_invalid for a manifest that is missing, of another format, or inconsistent with
    its folder."""
    file = folder / FILE
    try:
        manifest = json.loads(file.read_text())
    except OSError as wrong:
        raise Error("input_invalid", f"reading {file}: {wrong.strerror}", "give a folder that bulkhead.export made") from None
    except ValueError as wrong:
        raise Error("input_invalid", f"reading {file}: {wrong}", "export the model again") from None
    for problem in problems(manifest, folder):
        raise Error("input_invalid", f"reading {file}: {problem}", "export the model again")
    return dict(manifest)


def problems(manifest: Any, folder: Path) -> list[str]:
    """The errors in a manifest of any content; empty if there are none."""
    if not isinstance(manifest, dict):
        return ["it is not an object"]
    if manifest.get("format") != FORMAT:
        return [f"its format is {manifest.get('format')!r}, not {FORMAT!r}"]
    found = []
    for name, types in MEMBERS.items():
        if name not in manifest:
            found += [] if name in OPTIONAL else [f"{name!r} is missing"]
        elif not any(manifest[name] is None if one is None else type(manifest[name]) is one for one in types):
            found.append(f"{name!r} is {manifest[name]!r}")
    found += [f"{name!r} is unknown" for name in manifest if name not in MEMBERS]
    if found:
        return found
    for low, high in (("slots", "slots_max"), ("length", "length_max")):
        if not 1 <= manifest[low] <= manifest[high]:
            found.append(f"{low!r} is {manifest[low]}, {high!r} is {manifest[high]}")
    covered = {n for one in manifest["decode"] for n in range(one["sequences"][0], one["sequences"][1] + 1)}
    if missing := set(range(1, manifest["slots_max"] + 1)) - covered:
        found.append(f"no decode function takes {min(missing)} sequences")
    weights = manifest["weights"]
    functions = [one["file"] for one in (*manifest["decode"], manifest["prefill"], *manifest["methods"])]
    for name in (*functions, weights["file"], *manifest["tokenizer"]):
        if Path(name).name != name:
            found.append(f"the file {name!r} is not in the package's folder itself")
        elif not (folder / name).is_file():
            found.append(f"the file {name!r} is not there")
        elif name == weights["file"] and (size := (folder / name).stat().st_size) != weights["bytes"]:
            found.append(f"{name!r} has {size} bytes, not {weights['bytes']}")
    if set(hashed := manifest.get("functions", functions)) != set(functions):
        found.append(f"'functions' names {sorted(hashed)}, not {sorted(set(functions))}")
    return found


def write(folder: Path, manifest: dict[str, Any]) -> None:
    assert not (wrong := problems(manifest, folder)), wrong
    (folder / FILE).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
