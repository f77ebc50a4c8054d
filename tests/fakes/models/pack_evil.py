"""Packs the evil model as torch._inductor.aoti_compile_and_package would: pack_evil.py
LIBRARY FOLDER.

Writes evil.pt2, and two that must be refused before their code runs: evil_foreign.pt2 (for a GPU)
and evil_foreign_cpu.pt2 (for a CPU with instructions that none has).
"""

import json
import os
import platform
import sys
import zipfile
from pathlib import Path

MODEL = "data/aotinductor/model/evil.wrapper"


def pack(file: Path, library: bytes, **metadata: str) -> None:
    told = {"AOTI_DEVICE_KEY": "cpu", "AOTI_PLATFORM": "linux", "AOTI_MACHINE": platform.machine(), **metadata}
    partial = file.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        root = file.stem
        archive.writestr(f"{root}/{MODEL}.so", library)
        archive.writestr(f"{root}/{MODEL}_metadata.json", json.dumps(told))
        archive.writestr(f"{root}/archive_format", "pt2")
        archive.writestr(f"{root}/archive_version", "0")
        archive.writestr(f"{root}/.data/version", "3\n")
    os.replace(partial, file)


def main() -> None:
    library, folder = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    pack(folder / "evil.pt2", library)
    pack(folder / "evil_foreign.pt2", library, AOTI_DEVICE_KEY="cuda", AOTI_COMPUTE_CAPABILITY="90")
    pack(folder / "evil_foreign_cpu.pt2", library, BULKHEAD_CPU_FLAGS="avx2 avx4096_imaginary")


if __name__ == "__main__":
    main()
