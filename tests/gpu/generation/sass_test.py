"""Our kernels as the assembler left them, for sm_90: no loop of compare-and-swap stands for an
atomic sum, nothing is kept in
local memory. Needs cuobjdump, no GPU.  Usage: sass_test.py CUOBJDUMP OBJECT. Prints each kernel's
                                        counts; exit 77: skipped."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

DRAWS = {"draw_kernel<one block>": "draw_kernelILb0EE", "draw_kernel<cluster>": "draw_kernelILb1EE"}


def dump(cuobjdump: str, what: str, file: Path) -> str:
    done = subprocess.run([cuobjdump, what, "-arch", "sm_90", str(file)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{cuobjdump} {what} {file}: {done.stderr.strip()}")
    return done.stdout


def kernels(sass: str) -> dict[str, Counter[str]]:
    """Each kernel's instructions, without their operands."""
    found: dict[str, Counter[str]] = {}
    for line in sass.splitlines():
        if start := re.search(r"Function : (\S+)", line):
            now = found.setdefault(start[1], Counter())
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            now[instruction[1]] += 1
    return found


def counted(instructions: Counter[str], pattern: str) -> int:
    return sum(count for name, count in instructions.items() if re.search(pattern, name))


def main() -> None:
    cuobjdump, file = sys.argv[1], Path(sys.argv[2])
    if not Path(cuobjdump).is_file():
        print("skipped: no cuobjdump; it comes with the CUDA toolkit and in Triton's package")
        sys.exit(77)
    found = kernels(dump(cuobjdump, "-sass", file))
    usage = re.findall(r"Function (\S+?):\s+(REG.*)", dump(cuobjdump, "-res-usage", file))
    faults = []
    for name, instructions in found.items():
        if spins := counted(instructions, r"\.CAS|\.SPIN"):
            faults.append(f"{name}: {spins} compare-and-swaps")
        if local := counted(instructions, r"^(LDL|STL)"):
            faults.append(f"{name}: {local} accesses to local memory")
    for name, used in usage:
        if not re.search(r"STACK:0 .*LOCAL:0", used):
            faults.append(f"{name}: {used}")
    for title, part in DRAWS.items():
        names = [name for name in found if part in name]
        if len(names) != 1 or not any(part in name for name, _ in usage):
            faults.append(f"{title}: {len(names)} kernels of sm_90 in {file.name}, expected one and its usage")
            continue
        instructions = found[names[0]]
        print(f"{title}: {instructions.total()} instructions, {counted(instructions, r'^ATOMS.ADD')} ATOMS.ADD,",
              f"{counted(instructions, r'^(REDG|RED|ATOMG).*ADD')} sums in device memory, {counted(instructions, '^UCGABAR_WAIT')} barriers of the cluster;",
              next(used for name, used in usage if part in name).split(" TEXTURE")[0])  # fmt: skip
        if counted(instructions, r"^ATOMS\.ADD") == 0:
            faults.append(f"{title}: no ATOMS.ADD; what does its histogram add by?")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
