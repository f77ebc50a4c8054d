"""The JSON Schema and the strict reader say the same of every example fleet.

    schema_agreement.py SOURCE_FOLDER BULKHEAD_PROGRAM

A good example must pass both; a bad one must fail both, unless fleets/bad.txt says `(no schema)` of
it: then its fault is one that a schema cannot express. What the reader says is what
`bulkhead validate --json` prints.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import jsonschema
import yaml


class CoreSchemaLoader(yaml.SafeLoader):
    """YAML 1.2's core schema, as editors and the reader have it: `off` is text, a
    duplicate key an error."""

    yaml_implicit_resolvers = {}

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.constructor.ConstructorError(None, None, "duplicate key", node.start_mark)
        return {self.construct_object(key, deep=True): self.construct_object(value, deep=True)
                for key, value in node.value}


for tag, pattern, first in [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     list("-+.0123456789")),
]:
    CoreSchemaLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)
CoreSchemaLoader.add_constructor("tag:yaml.org,2002:map", lambda loader, node: loader.construct_mapping(node))


def schema_accepts(validator, path):
    try:
        document = yaml.load(path.read_bytes(), CoreSchemaLoader)
    # TypeError: a key that is a list.
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, TypeError) as error:
        return False, str(error).splitlines()[0]
    errors = [error.message for error in validator.iter_errors(document)]
    return not errors, "; ".join(errors)


def reader_diagnostics(program, path):
    finished = subprocess.run([program, "validate", "--json", path], capture_output=True, timeout=30, check=False)
    document = json.loads(finished.stdout)
    assert finished.returncode == (78 if document["errors"] else 0), f"{path}: exit status {finished.returncode}"
    return document["errors"]


def bad_examples(examples, folder):
    """Writes each of fleets/bad.txt as a file; yields its path, and whether its fault is
    beyond a schema."""
    (folder / "models").symlink_to(examples / "models")
    (folder / "bad").mkdir()
    model = "version: 1\nmodels:\n  a:\n    runtime: torchscript\n    file: ../models/a.pt\n"
    cases = re.findall(r"((?:^[+=] \d+:.*\n)+)((?:^(?![+=] \d).*\n)+)", (examples / "bad.txt").read_text("utf-8"), re.MULTILINE)
    for number, (expected, text) in enumerate(cases):
        path = folder / "bad" / f"{number}.yaml"
        path.write_text(text if expected[0] == "=" else model + text, "utf-8")
        yield path, "(no schema)" in expected


def main():
    source, program = pathlib.Path(sys.argv[1]), sys.argv[2]
    schema = json.loads((source / "config/fleet.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    failures, judged, beyond = [], 0, 0

    examples = source / "tests/unit/config/fleets"
    folder = tempfile.TemporaryDirectory()
    bad = dict(bad_examples(examples, pathlib.Path(folder.name)))
    for path in [*sorted([*(source / "config/fleets").glob("*.yaml"), *examples.glob("good/*.yaml")]), *bad]:
        judged += 1
        is_bad = path in bad
        cannot = bad.get(path, False)
        accepted, why = schema_accepts(validator, path)
        diagnostics = reader_diagnostics(program, path)
        if path.parent.name == "fleets":  # the demo's models may not be prepared yet
            diagnostics = [d for d in diagnostics if ": no file " not in d["attempt"]]
        if bool(diagnostics) != is_bad:
            failures.append(f"{path}: the reader says {diagnostics or 'good'} of {path.read_text()}")
        if cannot:
            beyond += 1
            if not accepted:
                failures.append(f"{path}: the schema does express this ({why}): remove the mark of {path.read_text()}")
        elif accepted == is_bad:
            failures.append(f"{path}: the schema says {why or 'good'} of {path.read_text()}")

    print(*failures, sep="\n")
    print(f"{judged} examples, {beyond} of them beyond a schema, {len(failures)} disagreements")
    assert judged > 40 and beyond * 4 < judged
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
