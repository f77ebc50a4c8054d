"""control.py JSON: writes the control socket's methods of control.json as C++.

Run by CMake at configure time.
"""

import json
import sys
from pathlib import Path


def header(spec: dict) -> str:
    words = "".join(f"    {word},  ///< {meaning}\n" for word, meaning in spec["repeat"].items())
    methods = "".join(f'    {{"{name}", Repeat::{word}}},\n' for name, word in spec["methods"].items())
    return "\n".join([
        "#pragma once", "", "/// Made from ipc/links/control.json by ipc/links/control.py: change those.", "", "#include <array>",
        "#include <string_view>", "#include <utility>", "", "namespace bulkhead::control {", "",
        "/// What may be done about a call whose connection ended after it had been sent, and before its answer.",
        f"enum class Repeat {{\n{words}}};", "",
        "inline constexpr std::array<std::pair<std::string_view, Repeat>, "
        f"{len(spec['methods'])}> methods{{{{\n{methods}}}}};", "", "}  // namespace bulkhead::control", ""])  # fmt: skip


if __name__ == "__main__":
    print(header(json.loads(Path(sys.argv[1]).read_text("utf-8"))), end="")
