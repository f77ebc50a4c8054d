"""worker_link.py JSON: writes worker_link.json as C++: its messages, or with --page its page.

Run by CMake at configure time.
"""

import json
import re
import sys
from pathlib import Path

TYPES = {"bool": "bool", "u32": "std::uint32_t", "u64": "std::uint64_t", "i32": "std::int32_t", "i64": "std::int64_t",
         "text": "std::string", "object": "boost::json::object"}  # fmt: skip


def camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def cpp(kind: str) -> str:
    base, suffix = re.fullmatch(r"(\w+)(\?|\[\d*\]|)", kind).groups()
    base = TYPES.get(base, base)
    if suffix == "?":
        return f"std::optional<{base}>"
    if suffix == "[]":
        return f"std::vector<{base}>"
    return f"std::array<{base}, {suffix[1:-1]}>" if suffix else base


def struct(name: str, spec: dict, type_name: str = "") -> str:
    lines = [f"struct {name} {{"]
    if type_name:
        lines += [f'    static constexpr std::string_view type = "{type_name}";',
                  f"    static constexpr std::size_t fds = {spec.get('fds', 0)};"]  # fmt: skip
    for member, kind, *_ in spec["members"]:
        lines.append(f"    {cpp(kind)} {member}{{}};")
    lines.append("    static void members([[maybe_unused]] auto& self, [[maybe_unused]] auto&& visit) {")
    for member, *_ in spec["members"]:
        need = "true" if member in spec.get("required", ()) else "false"
        lines.append(f'        visit("{member}", self.{member}, {need});')
    lines += ["    }", f"    friend bool operator==(const {name}&, const {name}&) = default;", "};", ""]
    return "\n".join(lines)


def header(spec: dict) -> str:
    parts = ["#pragma once", "", "/// Made from ipc/links/worker_link.json by ipc/links/worker_link.py: change those.", "",
             "#include <array>", "#include <cstddef>", "#include <cstdint>", "#include <optional>", "#include <string>",
             "#include <string_view>", "#include <variant>", "#include <vector>", "", "#include <boost/json/object.hpp>", "",
             "namespace bulkhead::worker_link {", "", f"inline constexpr std::uint64_t version = {spec['version']};"]  # fmt: skip
    parts += [f"inline constexpr std::size_t {name} = {value};" for name, value in spec["limits"].items()] + [""]
    parts += [struct(name, one) for name, one in spec["objects"].items()]
    for direction in ("to_daemon", "to_worker"):
        within = {kind.rstrip("?") for one in spec[direction].values() for _, kind, *_ in one["members"]}
        for name, one in sorted(spec[direction].items(), key=lambda item: camel(item[0]) not in within):
            parts.append(struct(camel(name), one, name))
    for fate in ("dropped", "kept"):
        names = [f'"{name}"' for name, one in spec["to_daemon"].items() if one.get("unread") == fate]
        parts.append(f"/// Messages to the daemon that are {fate} while it does not read.")
        parts.append(f"inline constexpr std::array<std::string_view, {len(names)}> {fate}_unread{{{', '.join(names)}}};")
    parts.append("\n/// A type that this release does not know.\nstruct Unknown {\n    std::string type;\n};\n")
    for direction in ("to_daemon", "to_worker"):
        names = ", ".join([camel(name) for name in spec[direction]] + ["Unknown"])
        parts.append(f"using {camel(direction)} = std::variant<{names}>;")
    return "\n".join([*parts, "", "}  // namespace bulkhead::worker_link", ""])


def page(spec: dict) -> str:
    members, checks = [], []
    for name, kind, at, _ in spec["members"]:
        atomic, base, count = re.fullmatch(r"(atomic )?(\w+)(?:\[(\d+)\])?", kind).groups()
        base = {"u8": "std::byte", **TYPES}.get(base, base)
        base = f"std::array<{base}, {count}>" if count else f"std::atomic<{base}>" if atomic else base
        members.append(f"    {'' if at else 'alignas(64) '}{base} {name};")
        checks.append(f"static_assert(offsetof(Page, {name}) == {at});")
    return "\n".join([
        "#pragma once", "", "/// Made from ipc/links/worker_link.json by ipc/links/worker_link.py: change those.", "",
        "#include <array>", "#include <atomic>", "#include <cstddef>", "#include <cstdint>", "", "namespace bulkhead::worker_page {", "",
        f"inline constexpr std::size_t page_bytes = {spec['bytes']};", f"inline constexpr std::uint32_t magic = {spec['magic']};", "",
        "/// Its members are described in docs/worker-link.md. The reader must not trust them: the worker may write them at any time.",
        "struct Page {", *members, "};", *checks, "static_assert(sizeof(Page) <= page_bytes);",
        "static_assert(std::atomic<std::uint64_t>::is_always_lock_free);",
        "inline constexpr std::size_t request_text_bytes = sizeof(Page::request);", "", "}  // namespace bulkhead::worker_page", ""])  # fmt: skip


if __name__ == "__main__":
    SPEC = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    print(page(SPEC["page"]) if "--page" in sys.argv else header(SPEC), end="")
