"""wire.py JSON: writes wire.json as C++, or with --errors its error codes alone.

Run by CMake at configure time.
"""

import json
import re
import sys
from pathlib import Path

ENUMS = {"MessageType": "std::uint16_t", "SlabDirection": "std::uint16_t", "SlabKind": "std::uint16_t",
         "DType": "std::uint8_t"}  # fmt: skip
CONSTANTS = {"Flag": "std::uint32_t", "Feature": "std::uint64_t"}
LIMITS = {"tensor_alignment": "std::uint64_t", "lent_slab_id_min": "std::uint32_t"}
ARRAYS = {"u8[16]": "GpuUuid", "u8[64]": "CudaIpcHandle", "char[56]": "std::array<char, name_bytes>",
          "char[64]": "std::array<char, method_bytes>"}  # fmt: skip
SOURCE = "/// Made from ipc/channel/wire.json by ipc/channel/wire.py: change those."


def cpp(kind: str) -> str:
    if kind in ARRAYS:
        return ARRAYS[kind]
    base, count = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", kind).groups()
    base = re.sub(r"^([ui])(\d+)$", lambda found: f"{'u' * (found[1] == 'u')}int{found[2]}_t", base)
    base = f"std::{base}" if base.endswith("_t") else base
    return f"std::array<{base}, {count}>" if count else base


def enum(name: str, type_name: str, words: dict) -> str:
    return f"enum class {name} : {type_name} {{\n" + "".join(f"    {word} = {value},\n" for word, value in words.items()) + "};"


def struct(name: str, spec: dict) -> str:
    members = "".join(f"    {cpp(kind)} {member};\n" for member, kind in spec["fields"])
    return (f"struct {name} {{\n{members}}};\n"
            f"static_assert(std::has_unique_object_representations_v<{name}> && sizeof({name}) == {spec['size']});\n")  # fmt: skip


def header(spec: dict) -> str:
    parts = ["#pragma once", "", SOURCE, "/// Its prose is docs/channel.md.", "", "#include <array>", "#include <cstddef>",
             "#include <cstdint>", "#include <type_traits>", "", "namespace bulkhead::wire {", "",
             f"inline constexpr std::uint32_t magic = {spec['magic']};",
             f"inline constexpr std::uint16_t version = {spec['version']};"]  # fmt: skip
    parts += [f"inline constexpr {LIMITS.get(name, 'std::size_t')} {name} = {value};" for name, value in spec["limits"].items()]
    parts += ["", *(enum(name, type_name, spec["enums"][name]) for name, type_name in ENUMS.items())]
    parts += [f"inline constexpr {type_name} {group.lower()}_{name} = {value};"
              for group, type_name in CONSTANTS.items() for name, value in spec["enums"][group].items()]  # fmt: skip
    parts += ["", "using GpuUuid = std::array<std::uint8_t, 16>;", "using CudaIpcHandle = std::array<std::byte, ipc_handle_bytes>;",
              "", *(struct(name, one) for name, one in spec["structs"].items()), "}  // namespace bulkhead::wire", ""]  # fmt: skip
    return "\n".join(parts)


def errors(spec: dict) -> str:
    codes = spec["enums"]["ErrorCode"]
    names = "".join(f'    {{ErrorCode::{name}, "{name}"}},\n' for name in codes)
    return "\n".join([
        "#pragma once", "", SOURCE, "", "#include <array>", "#include <cstdint>", "#include <string_view>", "#include <utility>", "",
        "namespace bulkhead {", "", enum("ErrorCode", "std::uint16_t", codes), "",
        f"inline constexpr std::array<std::pair<ErrorCode, std::string_view>, {len(codes)}> error_code_names{{{{\n{names}}}}};", "",
        "}  // namespace bulkhead", ""])  # fmt: skip


if __name__ == "__main__":
    SPEC = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    print(errors(SPEC) if "--errors" in sys.argv else header(SPEC), end="")
