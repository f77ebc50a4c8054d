#!/usr/bin/env python3
"""Makes docs/configuration.md and a list in docs/control.md from config/fleet.schema.json, the
tables of docs/worker-link.md from ipc/links/worker_link.json and
supervisor/states/message_answers.h, and the transitions and answers in docs/operations.md from
supervisor/states/lifecycle.h and request_answers.h, so that they cannot differ.

    reference.py            write them
    reference.py --check    exit 1 if one is not up to date
"""

import json
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "config"))
from fleet_keys import Schema  # noqa: E402
SCHEMA = ROOT / "config/fleet.schema.json"
PAGE = ROOT / "docs/configuration.md"
CONTROL_PAGE = ROOT / "docs/control.md"
LINK = ROOT / "ipc/links/worker_link.json"
LINK_PAGE = ROOT / "docs/worker-link.md"
LIFECYCLE = ROOT / "supervisor/states/lifecycle.h"
ANSWERS = ROOT / "supervisor/states/message_answers.h"
REQUESTS = ROOT / "supervisor/states/request_answers.h"
LIFECYCLE_PAGE = ROOT / "docs/operations.md"

INTRODUCTION = """\
# The fleet file

<!-- Made from config/fleet.schema.json by scripts/reference.py: change those. -->

A fleet file names the models that one daemon serves. `bulkhead validate FILE` checks it without a
daemon and tells all errors at once, each with line, column and remedy; `bulkhead up FILE` starts a
daemon with it. Examples: [demo.yaml](../config/fleets/demo.yaml),
[gpu.yaml](../config/fleets/gpu.yaml). An editor with a YAML language server completes and checks it
by `# yaml-language-server: $schema=PATH/config/fleet.schema.json` in the first line.

```yaml
{example}```

"""

VALUES = """\
## Values

- **duration**: a whole number and a unit, `250ms`, `30s`, `2m`, `1h`; at least 1 ms, at most 24 h.
- **size**: bytes, or `64KiB`, `4MiB`, `2GiB`.
- **path**: a relative one is taken from the folder of the fleet file. `~` and `$VARIABLES` are not
  expanded, in paths or anywhere else.
- **device**: `auto`, `cpu`, `cuda:0` (in NVML's order), `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
- **range** of replicas: `{min: 1, max: 3}`, each from 1 to 8. Those beyond `min` are started while
  requests wait at every other one, and unloaded when they are idle.
- **dimension**: `512`, or a range `1..256` with both ends included; with a name, `n=1..256`.
  Dimensions of one name are of one size in a request. A package (`aoti`) with several dynamic
  dimensions among its inputs needs them named: it does not check that they agree. Different names
  mean sizes that may differ.

## What is refused

The reader is strict. An unknown key, a key that stands twice, a value of the wrong type, a missing
model file, a bucket or warm-up outside the declared shapes: each is an error, none is ignored. The
text is YAML 1.2 in UTF-8: `off` and `yes` are words, `"1"` is text and no number. One document a
file, without tags and without merge keys (`<<`); use `defaults`. Indentation has no tabs. Aliases
(`*name`) may be used within bounds: with every alias expanded a file has at most 10,000 values,
nested at most 32 deep, in at most 1 MiB.

```
$ bulkhead validate fleet.yaml
fleet.yaml:5:5: error: model "minilm": unknown key "devise"
  did you mean "device"?
fleet.yaml:9:44: error: model "minilm": inputs.input_ids: shape[1] = 256..1
  write the smaller end first: 1..256
```
"""

SECTIONS = ["limit", "defaults", "model", "group", "deadlines", "channel", "state", "generate", "method", "tensor", "parameter"]
TITLES = {name: f"A {name}" if name in ("limit", "model", "method", "tensor", "parameter") else name for name in SECTIONS}


def kind(entry):
    """What stands in the column `value`: a link where the value has a section of its own."""
    title = entry.get("title", "")
    if title in SECTIONS and entry.get("type") == "object":
        return f"[{title}](#{TITLES[title].lower().replace(' ', '-')})"
    return re.sub(r"^map of (tensor|parameter|method|model|limit)s$", r"map of [\1s](#a-\1)", title)


def table(schema, entry):
    rows = ["| key | value | default | |", "| --- | --- | --- | --- |"]
    for key, value in entry["properties"].items():
        value = schema.resolved(value)
        default = value.get("default")
        shown = "required" if key in entry.get("required", []) else "" if default is None else f"`{json.dumps(default)}`"
        rows.append(f"| `{key}` | {kind(value)} | {shown.replace(chr(34), '')} | {value['description']} |")
    return "\n".join(rows) + "\n"


def page(schema):
    text = INTRODUCTION.replace("{example}", (ROOT / "config/fleets/demo.yaml").read_text())
    text += f"## The file\n\n{table(schema, schema.spec)}\n"
    for name in SECTIONS:
        entry = schema.defs[name]
        text += f"## {TITLES[name]}\n\n{textwrap.fill(entry['description'], 100)}\n\n"
        if name != "defaults":
            text += table(schema, entry) + "\n"
    return text + VALUES


def supervisor_keys(schema):
    """What only the supervisor acts upon."""
    keys = [f"`{under}.{key}`" if under else f"`{key}`" for under, key in schema.supervisor_keys()]
    return textwrap.fill(", ".join(keys) + ".", 100)


def messages(entries):
    """A table of messages, or of the objects in them."""
    has_when = any("when" in entry for entry in entries.values())
    rows = ["| type | members | when |", "| --- | --- | --- |"] if has_when else ["| type | members |", "| --- | --- |"]
    for name, entry in entries.items():
        members = []
        for member, kind, *about in entry["members"]:
            shown = f"**`{member}`**" if member in entry.get("required", []) else f"`{member}`"
            members.append(f"{shown} {kind}" + "".join(f" ({text})" for text in about))
        if "fds" in entry:
            members.append(f"{entry['fds']} descriptor")
        rows.append(f"| `{name}` | {', '.join(members)} |" + (f" {entry['when']} |" if has_when else ""))
    return "\n".join(rows)


def page_members(page):
    rows = ["| at | type | member | |", "| --- | --- | --- | --- |"]
    return "\n".join(rows + [f"| {at} | {kind} | `{name}` | {about} |" for name, kind, at, about in page["members"]])


def names_of(kind, header):
    return re.findall(r'"(\w+)"', re.search(rf"worker_{kind}_names{{(.*?)}}", header, re.DOTALL)[1])


def transitions(header):
    """The table of transitions in C++: a row for each state, a cell for each event."""
    states, events = names_of("state", header), names_of("event", header)
    short_names = dict(re.findall(r"(\w+) = WorkerState::(\w+)", header))
    rows = ["| in state | event → next state |", "| --- | --- |"]
    for state, (name, cells) in zip(states, re.findall(r"/\*(\w+) *\*/{{(.*)}},", header), strict=True):
        answers = zip(events, re.findall(r"\w+|{}", cells), strict=True)
        assert state == name, f"{LIFECYCLE}: the row of {state} says {name}"
        rows.append(f"| `{state}` | {', '.join(f'{event} → `{short_names[to]}`' for event, to in answers if to != '{}')} |")
    return "\n".join(rows) + "\n"


def request_answers(header):
    """What is asked of a replica: a row for each state."""
    columns = re.search(r"//  +(load .*)", header)[1].split()
    rows = ["| in state | " + " | ".join(f"`{column}`" for column in columns) + " |", "| --- |" + " --- |" * len(columns)]
    for state, cells in re.findall(r"/\*(\w+) *\*/ {(.*)},", header):
        rows.append(f"| `{state}` | " + " | ".join(re.findall(r"::(\w+)", cells)) + " |")
    return "\n".join(rows)


def message_answers(header, states):
    """The table of messages in C++: a row for each message, a cell for each state."""
    rows = ["| | " + " | ".join(states) + " |", "| --- |" + " :-: |" * len(states)]
    for name, cells in re.findall(r'{"(\w+)", +"([+!.]+)"},', header):
        rows.append(f"| `{name}` | " + " | ".join(cell.replace(".", " ") for _, cell in zip(states, cells, strict=True)) + " |")
    return "\n".join(rows)


def page_with(tables, page):
    """The page as it is, with its tables made again.

    Each is between `<!-- its name -->` and `<!-- end -->`.
    """
    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", lambda found: f"<!-- {found[1]} -->\n{tables[found[1]]}\n<!-- end -->",
                  page.read_text(), flags=re.DOTALL)  # fmt: skip


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__)
        return 2
    link = json.loads(LINK.read_text())
    lifecycle = LIFECYCLE.read_text()
    link = {name: messages(link[name]) for name in ("to_daemon", "to_worker", "objects")} | {"page": page_members(link["page"])}
    link["message_answers"] = message_answers(ANSWERS.read_text(), names_of("state", lifecycle))
    schema = Schema(json.loads(SCHEMA.read_text()))
    pages = {PAGE: page(schema), CONTROL_PAGE: page_with({"supervisor_keys": supervisor_keys(schema)}, CONTROL_PAGE), LINK_PAGE: page_with(link, LINK_PAGE),
             LIFECYCLE_PAGE: page_with({"transitions": transitions(lifecycle), "request_answers": request_answers(REQUESTS.read_text())}, LIFECYCLE_PAGE)}  # fmt: skip
    outdated = [path for path, made in pages.items() if not path.exists() or path.read_text() != made]
    for path in outdated:
        if sys.argv[1:]:
            print(f"{path.relative_to(ROOT)} is not up to date: run scripts/reference.py")
        else:
            path.write_text(pages[path])
    return 1 if sys.argv[1:] and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
