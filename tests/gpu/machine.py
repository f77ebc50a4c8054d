"""What a machine has that the GPU tests need, found out before the first of them starts.

Nothing here is fatal: what is missing is named, worked around where that is possible, and else
becomes the reason for which tests are skipped.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

#: Run in a process of its own: a driver that hangs, or a torch that crashes, stops only this.
ASK_TORCH = """
import json, torch
from torch.utils import cpp_extension
has_gpu = torch.cuda.is_available()
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "folder": torch.__path__[0], "toolkit": cpp_extension.CUDA_HOME,
                  "gpu": torch.cuda.get_device_name(0) + ", sm_%d%d" % torch.cuda.get_device_capability(0) if has_gpu else ""}))
"""
ASK_TORCH_S = 120  # cold, from a network disk; 10 s on a warm one

FUTEX_WAITV = 449  # x86-64; Linux 5.16


class Machine:
    """`lines` tell what was found, `environment` is that of every test. Of the reasons, each is
    empty where it does not hold.

    no_programs     none of the carried programs can start
    no_libtorch     none that loads LibTorch can
    no_gpu          of the driver
    no_export       no package can be compiled for a GPU here
    """

    def __init__(self, build: Path, rehearse: bool) -> None:
        self.lines: list[str] = []
        self.scratch = tempfile.TemporaryDirectory(prefix="bh-machine-")
        self.build = build
        # What was carried may have lost its mode.
        for program in [*build.glob("bin/*"), *build.glob("minimal/bin/*")]:
            if not os.access(program, os.X_OK):
                program.chmod(0o755)
        self.no_programs = self.no_libtorch = self.no_gpu = self.no_export = ""
        self.environment = dict(os.environ)
        self.environment.update(BULKHEAD_BUILD=str(build), PYTHONDONTWRITEBYTECODE="1", PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1")
        self.path("PYTHONPATH", ROOT / "clients" / "python", *([ROOT / "python"] if (ROOT / "python").is_dir() else []))
        self.carried: dict[str, Any] = json.loads((ROOT / "pack.json").read_text()) if (ROOT / "pack.json").is_file() else {}
        self.tell("carried", f"commit {self.carried['commit']}, built with torch {self.carried['torch']}" if self.carried else "nothing: this is the tree itself")
        self.look_at_kernel()
        self.look_at_libraries()
        self.look_at_torch()
        if rehearse:
            self.no_gpu = "a rehearsal"
            self.environment["BULKHEAD_LIBCUDA"] = str(build / "lib" / "libbulkhead_fake_cuda.so")
        else:
            self.look_at_driver()
        self.look_at_tools()
        self.tell("GPU", self.no_gpu and f"none: {self.no_gpu}" or "yes")

    def tell(self, what: str, found: str) -> None:
        self.lines.append(f"{what:<12} {found}")

    def path(self, name: str, *folders: Path | str) -> None:
        """Before what the variable has, which may name the driver's own folder."""
        had = self.environment.get(name, "")
        self.environment[name] = os.pathsep.join([*map(str, folders), *([had] if had else [])])

    def look_at_kernel(self) -> None:
        release = os.uname().release
        self.tell("kernel", release)
        if release.startswith("4.4.0"):
            self.tell("sandbox", "gVisor by its release: GPU memory of another process may not be had by descriptor or handle; tests of slabs then say so")
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(FUTEX_WAITV, None, 0, 0, None, 0) == -1 and ctypes.get_errno() == 38:
            self.tell("futex_waitv", "none: a client learns of a worker's death by its socket alone")
        cgroup = Path("/sys/fs/cgroup")
        if not os.access(cgroup, os.W_OK):
            self.tell("cgroup", "none that we may write: workers are found by their environment, and have no limit of memory")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.tell("cores", f"{len(os.sched_getaffinity(0))}, memory {memory / 2**30:.0f} GiB, free in {tempfile.gettempdir()} "
                  f"{shutil.disk_usage(tempfile.gettempdir()).free / 2**30:.0f} GiB, in /dev/shm {free_of('/dev/shm'):.0f} GiB")  # fmt: skip

    def look_at_libraries(self) -> None:
        glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "unknown 0").split()[-1]
        wanted = self.carried.get("glibc", "0")
        self.tell("glibc", glibc)
        if numbers(glibc) < numbers(wanted):
            self.no_programs = f"glibc {glibc} here, and the programs need {wanted}: pack on a machine with this one or an older"
            self.tell("glibc", self.no_programs)
        libraries = [self.build / "lib"] if self.carried else []
        if numbers(self.carried.get("libstdc++", "0")) > numbers(libstdcxx_version()):
            libraries.append(self.build / "lib" / "newer")
            self.tell("libstdc++", f"{libstdcxx_version()}, older than the programs': the carried one is used")
        self.libraries: list[Path] = libraries

    def look_at_torch(self) -> None:
        found, said = asked([sys.executable, "-c", ASK_TORCH], ASK_TORCH_S)
        torch: dict[str, Any] = {}
        if found == 0:
            torch = json.loads(said.splitlines()[-1])
            self.tell("torch", f"{torch['version']}, CUDA {torch['cuda']}, {sys.executable} {sys.version.split()[0]}{', ' if torch['gpu'] else ''}{torch['gpu']}")
        else:
            self.no_libtorch = f"no torch under {sys.executable}: {last_line(said)}"
            self.tell("torch", self.no_libtorch)
        self.toolkit = self.find_toolkit(torch) if torch else None
        built_with = self.carried.get("torch", torch.get("version", ""))
        if torch and release_of(torch["version"]) != release_of(built_with):
            self.no_libtorch = f"torch {torch['version']} here, {built_with} where this was built: LibTorch's ABI is another"
            self.tell("torch", self.no_libtorch)
        if torch:
            torch_folder = Path(torch["folder"])
            nvidia = sorted(torch_folder.parent.glob("nvidia/*/lib"))
            cuda = [folder for folder in ((self.toolkit or Path("/usr/local/cuda")) / "lib64",) if folder.is_dir()]
            self.libraries += [torch_folder / "lib", *nvidia, *cuda]
        self.path("LD_LIBRARY_PATH", *self.libraries)

    def find_toolkit(self, torch: dict[str, Any]) -> Path | None:
        """The one that torch finds, else one that pip installed, which it does not find."""
        from_pip = [*sorted(Path(torch["folder"]).parent.glob("nvidia/cu[0-9]*")), *sorted(Path("/usr/local").glob("cuda*"))]
        for folder in [*([Path(torch["toolkit"])] if torch["toolkit"] else []), *from_pip]:
            if (folder / "include" / "cuda.h").is_file():
                self.tell("toolkit", str(folder))
                return folder
        self.tell("toolkit", "none with its headers")
        return None

    def look_at_driver(self) -> None:
        if containers := [folder for folder in ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib") if Path(folder, "libcuda.so.1").exists()]:
            # Where containers have it, unknown to ldconfig.
            self.environment["LD_LIBRARY_PATH"] += os.pathsep + containers[0]
        said = asked(["nvidia-smi", "--query-gpu=name,memory.total,driver_version,mig.mode.current", "--format=csv,noheader"], 30)[1]
        self.tell("nvidia-smi", last_line(said))
        opened = asked([sys.executable, "-c", "import ctypes; c = ctypes.CDLL('libcuda.so.1'); n = ctypes.c_int(); "
                        "print('cuInit', c.cuInit(0), 'GPUs', c.cuDeviceGetCount(ctypes.byref(n)) or n.value)"], 60, self.environment)[1]  # fmt: skip
        self.tell("driver", last_line(opened))
        if not re.search(r"cuInit 0 GPUs [1-9]", opened):
            self.no_gpu = last_line(opened).removeprefix("OSError: ")

    def look_at_tools(self) -> None:
        """What exports need."""
        if self.toolkit:
            self.environment["CUDA_HOME"] = str(self.toolkit)
            self.path("PATH", self.toolkit / "bin")
        missing = [name for name in ("nvcc", "ctest", "g++", "openssl") if shutil.which(name, path=self.environment["PATH"]) is None]
        meaning = {
            "nvcc": "our kernels were compiled beforehand",
            "ctest": "tests are started without it",
            "openssl": "exports precompile no headers",
            "g++": "no package is compiled here",
        }
        for name in missing:
            self.tell(name, f"none: {meaning[name]}")
        for name in ("transformers", "einops", "chatterbox"):
            if not has_module(name, self.environment):
                self.tell(name, "none: models that need it are not exported here")
        if self.no_libtorch or self.no_gpu:
            self.no_export = self.no_libtorch or f"no GPU: {self.no_gpu}"
        elif shutil.which("g++") is None:
            self.no_export = "no g++"
        elif not self.toolkit:
            self.no_export = "no CUDA toolkit: set CUDA_HOME"
        else:
            self.find_stub(self.toolkit)

    def find_stub(self, toolkit: Path) -> None:
        """Packages are linked with -lcuda: by the toolkit's stub, or by the driver itself
        under that name."""
        stubs = [*toolkit.glob("lib64/stubs/libcuda.so"), *toolkit.glob("lib/stubs/libcuda.so"), *toolkit.glob("targets/*/lib/stubs/libcuda.so")]
        if stubs:
            folder = stubs[0].parent
        else:
            folder = Path(self.scratch.name, "stub")
            folder.mkdir()
            driver = asked([sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1'); "
                            "print([line.split()[-1] for line in open('/proc/self/maps') if 'libcuda.so' in line][0])"], 60, self.environment)[1]  # fmt: skip
            (folder / "libcuda.so").symlink_to(last_line(driver))
            self.tell("libcuda stub", f"none in {toolkit}: packages are linked with the driver, {last_line(driver)}")
        # One from pip has its libraries in lib, under names with a version alone, which a linker
        # does not go by.
        unversioned = Path(self.scratch.name, "cudart")
        unversioned.mkdir()
        for library in toolkit.glob("lib/libcudart.so.*"):
            if not (toolkit / "lib64").is_dir() and not (toolkit / "lib" / "libcudart.so").exists():
                (unversioned / "libcudart.so").symlink_to(library)
                self.tell("libcudart", f"{library}: named libcudart.so for the linker")
                break
        self.path("LIBRARY_PATH", folder, unversioned)


def asked(command: list[str], bound_s: float, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and what was printed; 127 where there is no such program, 124 where
    it took longer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=bound_s, env=environment, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return 127, f"no {command[0]}"
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} did not answer within {bound_s} s"
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was said"])[-1].strip()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def release_of(version: str) -> tuple[int, ...]:
    """Major and minor: LibTorch's ABI holds among those."""
    return numbers(version)[:2]


def libstdcxx_version() -> str:
    """The newest that the machine's own has."""
    try:
        ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return "0"
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libstdc++.so" in line}
    found = re.findall(rb"GLIBCXX_(\d+\.\d+\.\d+)", Path(paths.pop()).read_bytes())
    return max((version.decode() for version in found), key=numbers, default="0")


def has_module(name: str, environment: dict[str, str]) -> bool:
    search = environment.get("PYTHONPATH", "").split(os.pathsep)
    return importlib.util.find_spec(name) is not None or any((Path(folder) / name).is_dir() for folder in search)


def free_of(folder: str) -> float:
    return shutil.disk_usage(folder).free / 2**30 if Path(folder).is_dir() else 0.0
