#!/usr/bin/env python3
"""Makes clients/python/bulkhead/engines/declarations.json from the classes of Bulkhead's engines.

It is for those who cannot import them: their methods, and what they load where their options are
left out. Needs torch and transformers.

    declarations.py            write it
    declarations.py --check    exit 1 if it is not up to date
"""

import importlib
import json
import pathlib
import sys

CLIENT = pathlib.Path(__file__).resolve().parent.parent / "clients/python"
FOLDER = CLIENT / "bulkhead/engines"
FILE = FOLDER / "declarations.json"


def declarations():
    from bulkhead.engine import methods_of
    from bulkhead.worker.declaration import describe

    found = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        module = importlib.import_module(f"bulkhead.engines.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "load"):
                found[f"{module.__name__}:{name}"] = {
                    "methods": describe(methods_of(value)),
                    "repositories": {option: getattr(module, option.upper()) for option in ("model", "codec") if hasattr(module, option.upper())},
                    "cache_lengths": list(getattr(module, "CACHE_LENGTHS", ())),
                }
    return found


def laid_out(value, indent=""):
    """As JSON, an object that holds no other in one line."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(one, (dict, list)) and (isinstance(one, dict) or any(isinstance(item, dict) for item in one)) for one in inner):
        return json.dumps(value, ensure_ascii=False)
    deeper = indent + " "
    if isinstance(value, list):
        return "[" + ",".join(f"\n{deeper}{laid_out(one, deeper)}" for one in value) + f"\n{indent}]"
    return "{" + ",".join(f"\n{deeper}{json.dumps(key)}: {laid_out(one, deeper)}" for key, one in value.items()) + f"\n{indent}}}"


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__)
        return 2
    sys.path.insert(0, str(CLIENT))
    made = laid_out(declarations()) + "\n"
    if not sys.argv[1:]:
        FILE.write_text(made)
    elif FILE.read_text() != made:
        print(f"{FILE} is not up to date: run scripts/declarations.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
