"""engine_in_process.py MODULE:CLASS OPTIONS [DEVICE]: an engine called without a worker, a baseline
of the bench "engines".

Reads a line of JSON for each request, {"method", "parameters"}, and prints how many seconds its
answer took, to the end of its stream. What the engine prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "clients/python"))

from bulkhead.engine import LocalContext, methods_of  # noqa: E402


def seconds(engine: Any, method: str, parameters: dict[str, Any]) -> float:
    declared = methods_of(type(engine))[method]
    defaults = {parameter.name: parameter.default for parameter in declared.parameters if parameter.default is not None}
    begun = time.monotonic()
    for _ in getattr(engine, method)(**{**defaults, **parameters}):
        pass
    return time.monotonic() - begun


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    module, _, name = sys.argv[1].partition(":")
    engine = getattr(importlib.import_module(module), name)()
    engine.load(LocalContext(json.loads(sys.argv[2]), device=sys.argv[3] if len(sys.argv) > 3 else "cpu"))
    for line in sys.stdin:
        asked = json.loads(line)
        print(seconds(engine, asked["method"], asked["parameters"]), file=answers, flush=True)


if __name__ == "__main__":
    main()
