"""rooms.py SOURCES BUILD: no file includes a header of a room that its own room's link line does
not lead to.

A header links anywhere, so the linker would not notice. BUILD/rooms.txt has what CMake was told
(cmake/Rooms.cmake): a line for each folder, with its target and the targets that it links.
LibTorch's headers count as those of `torch_cpu_only`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

INCLUDE = re.compile(r'^#include (?:"(?P<ours>[^"]+)"|<(?P<torch>(?:torch|ATen|c10|caffe2)/[^>]+)>)', re.MULTILINE)

SOURCE = (".h", ".cpp", ".cu")
# LibTorch's rooms and CUDA's may be left out; examples use what is installed.
OPTIONAL = ("worker", "clients/cpp/examples")


def main(sources: Path, build: Path) -> int:
    links: dict[str, set[str]] = {}
    folders: dict[str, str] = {}
    owners: dict[str, str] = {}  # by the folder as an include spells it
    for line in (build / "rooms.txt").read_text().splitlines():
        folder, target, *linked = line.split()
        links[target] = set(linked)
        folders[folder] = target
        owners[folder.split("/include/")[-1]] = target

    wrong = []
    for folder, target in folders.items():
        allowed = reached(target, links)
        for file in sorted([file for file in (sources / folder).iterdir() if file.suffix in SOURCE]):
            for found in INCLUDE.finditer(file.read_text()):
                owner = "torch_cpu_only" if found["torch"] else owners.get(str(Path(found["ours"]).parent))
                if owner is None:
                    wrong.append(f"{file.relative_to(sources)}: {found[0]} is in no room: name its folder in CMake")
                elif owner not in allowed:
                    wrong.append(f"{file.relative_to(sources)}: {found[0]} is of {owner}, which {target} does not link")
    for top in ("clients", "config", "ipc", "supervisor", "worker"):
        found_in = {str(file.parent.relative_to(sources)) for file in (sources / top).rglob("*") if file.suffix in SOURCE}
        undeclared = sorted(folder for folder in found_in - set(folders) if not folder.startswith(OPTIONAL))
        wrong += [f"{folder}: no room; name it in CMake" for folder in undeclared]
    print("\n".join(wrong) or f"{len(folders)} rooms, each includes what it links")
    return 1 if wrong else 0


def reached(target: str, links: dict[str, set[str]]) -> set[str]:
    """The targets that a link line leads to, itself included."""
    found: set[str] = set()
    pending = [target]
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending.extend(links.get(one, ()))
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
