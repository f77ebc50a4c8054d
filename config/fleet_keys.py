"""fleet_keys.py SCHEMA: writes the keys of fleet.schema.json as C++.

Run by CMake at configure time. Each struct has a member for each key, with its default, and
`keys(self, visit)`, which calls `visit(key, member, rule)` for each: reader and writer are such
visitors. A key with a `rule` of its own in the schema is several members, or one of a type of its
own: its visitor gets the whole object, after all other keys. Reader and writer spell the keys of
lists, methods and engines by the constants in `key::`.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

STRUCTS = {"deadlines": "Deadlines", "channel": "ChannelLimits", "generate": "GenerateSpec", "defaults": "ModelSettings"}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "": 1}
CPP = {True: "true", False: "false", "default": "default_"}


def amount(text: object) -> int:
    """Reads "4MiB" in bytes, "30s" in milliseconds."""
    number, unit = re.fullmatch(r"(\d+)(\w*)", str(text)).groups()
    return int(number) * UNITS[unit]


class Schema:
    def __init__(self, spec: dict) -> None:
        self.defs = spec["$defs"]
        self.spec = spec

    def resolved(self, entry: dict) -> dict:
        while "$ref" in entry:
            below = self.defs[entry["$ref"].removeprefix("#/$defs/")]
            entry = {**below, **{key: value for key, value in entry.items() if key != "$ref"}}
        return entry

    def member(self, key: str, entry: dict) -> tuple[str, str, str, str]:
        """C++ type, name, default and rule."""
        name, default, kind = entry.get("cpp", key), entry.get("default"), entry.get("type")
        if "enum" in entry:
            return entry["cpp"], key, f"{entry['cpp']}::{default}", "Enumeration{}"
        if key in STRUCTS:
            return STRUCTS[key], name, "", "Group{}"
        if key == "keep_alive":
            return "std::optional<std::chrono::milliseconds>", name, "", "KeepAlive{}"
        if entry["title"] == "duration":
            return "std::chrono::milliseconds", name, str(amount(default or 0)), "Duration{}"
        if entry["title"] == "size":
            bounds = entry["oneOf"][0]
            cpp = "std::uint64_t" if default is not None else "std::optional<std::uint64_t>"
            return cpp, name, "" if default is None else str(amount(default)), f"Size{{{bounds['minimum']}, {bounds['maximum']}}}"
        if kind == "boolean":
            return "bool", name, CPP[default], "Boolean{}"
        if kind == "integer":
            cpp = "std::uint32_t" if default is not None else "std::optional<std::uint32_t>"
            return cpp, name, "" if default is None else str(default), f"Integer{{{entry['minimum']}, {entry['maximum']}}}"
        if kind == "array":
            items = entry["items"]
            return "std::vector<std::uint32_t>", name, "", f"Lengths{{{entry['maxItems']}, {items['minimum']}, {items['maximum']}}}"
        raise ValueError(f"{key}: no C++ for {entry}")

    def struct(self, group: str) -> str:
        members, visits, whole = [], [], []
        for key, entry in self.defs[group]["properties"].items():
            entry = self.resolved(entry)
            if "remedy" in entry:
                visits.append(f'        visit("{key}", rule::Ignored{{{json.dumps(entry["remedy"])}}});')
            elif "rule" in entry:
                whole.append(f'        visit("{key}", self, rule::{entry["rule"]}{{}});')
            else:
                cpp, name, default, rule = self.member(key, entry)
                members.append(f"    {cpp} {name}{{{default}}};")
                visits.append(f'        visit("{key}", self.{name}, rule::{rule});')
        name = STRUCTS[group]
        return "\n".join([f"struct {name} {{", *members, "    static void keys(auto& self, auto&& visit) {", *visits, *whole, "    }",
                          f"    friend bool operator==(const {name}&, const {name}&) = default;", "};", ""])  # fmt: skip

    def parts(self, entry: object) -> Iterator[dict]:
        """Each object of the schema, before those in it."""
        below = entry if isinstance(entry, list) else []
        if isinstance(entry, dict):
            yield entry
            below = entry.values()
        for one in below:
            yield from self.parts(one)

    def enums(self) -> list[str]:
        found = []
        for entry in self.parts(self.spec):
            if "enum" in entry and "cpp" in entry:
                name, words = entry["cpp"], entry["enum"]
                found += [f"enum class {name} : std::uint8_t {{ {', '.join(words)} }};", "template <>",
                          f"inline constexpr std::array<Word<{name}>, {len(words)}> words<{name}>{{{{"
                          + ", ".join(f'{{"{word}", {name}::{word}}}' for word in words) + "}};", ""]  # fmt: skip
        return found

    def supervisor_keys(self) -> list[tuple[str, str]]:
        """Each with the key that it stands under; "" for the model itself."""
        groups = {"": "defaults", "deadlines": "deadlines"}
        return [(under, key) for under, group in groups.items() for key, entry in self.defs[group]["properties"].items()
                if self.resolved(entry).get("supervisor")]  # fmt: skip

    def header(self) -> str:
        supervisor = self.supervisor_keys()
        pairs = "".join(f'    {{"{under}", "{key}"}},\n' for under, key in supervisor)
        names = sorted({name for entry in self.parts(self.spec) for name in entry.get("properties", ())})
        methods = ", ".join(json.dumps(key) for key in self.defs["method"]["properties"])
        return "\n".join([
            "#pragma once", "", "/// Made from config/fleet.schema.json by config/fleet_keys.py: change those.", "",
            "#include <array>", "#include <chrono>", "#include <cstdint>", "#include <optional>", "#include <string>",
            "#include <string_view>", "#include <utility>", "#include <vector>", "", '#include "config/key_rules.h"', "", "namespace bulkhead::config {", "",
            *self.enums(), *(self.struct(group) for group in STRUCTS),
            "/// The spelling of each key.", "namespace key {",
            *(f'inline constexpr std::string_view {CPP.get(name, name)}{{"{name}"}};' for name in names), "}  // namespace key", "",
            "/// Of a method, under its name or directly under the model.",
            f"inline constexpr std::array<std::string_view, {methods.count(',') + 1}> method_keys{{{methods}}};", "",
            "/// What the supervisor alone acts upon, each with the key that it stands under, if any.",
            f"inline constexpr std::array<std::pair<std::string_view, std::string_view>, {len(supervisor)}> supervisor_keys{{{{",
            f"{pairs}}}}};", "",
            "}  // namespace bulkhead::config", ""])  # fmt: skip


if __name__ == "__main__":
    print(Schema(json.loads(Path(sys.argv[1]).read_text("utf-8"))).header(), end="")
