"""Makes the models of the GPU tests: make_models.py FOLDER [NAME...] (build/gpu-models).

Without names: the TorchScript models (NAME.pt), and on a machine with a GPU also those that are too
large to be carried, and the packages. Weights are random; what matters is what each model does when
it is captured. A model that is there is made again when this file or torch has changed. Exits with
3 where all was made but a package, or one gave other tokens than its model.
"""

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "clients" / "python"))

from bulkhead.export import inductor, twins  # noqa: E402

NOT_ALL = 3


class Mlp(nn.Module):
    """Rows are independent of each other, so padding them is safe."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Tokens(nn.Module):
    """A masked mean over tokens, and one row a token: padding with mask 0 changes neither."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 32)
        self.layer = nn.Linear(32, 32)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        each = torch.tanh(self.layer(self.table(ids)))
        weight = mask.unsqueeze(-1).to(each.dtype)
        return (each * weight).sum(1) / weight.sum(1), each


class Echo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


class ScaleOut(nn.Module):
    """Writes its results where it is told to, in the method's order of arguments."""

    def forward(self, x: Tensor, factor: Tensor, y: Tensor, z: Tensor) -> None:
        torch.mul(x, factor, out=y)
        torch.add(x, factor, out=z)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class HostRead(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum().item())


class HostReadNoise(nn.Module):
    """Fails to be captured after it has drawn: the generator must work eagerly afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        return x + noise * float(x.sum().item())


class CpuBorn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(16).to(x.device)


class Rebinds(nn.Module):
    """Keeps a sum between calls by giving the attribute a new tensor: a replay would read the
    first one for ever."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x
        return self.total * 1.0


class WritesInput(nn.Module):
    """Keeps nothing between calls, but leaves its input changed."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


class Slow(nn.Module):
    """4000 products of two 2048 × 2048 matrices: 70 TFLOP, a second in float32 on an H100."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(4000):
            y = torch.matmul(y, x)
        return y


class Heavy(nn.Module):
    """Weights of so many bytes, of which a call uses little."""

    def __init__(self, size: int = 2 << 30) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(size // 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[:16]


def save_torchscript(name: str, module: nn.Module, folder: Path) -> None:
    torch.jit.script(module.eval()).save(str(folder / f"{name}.pt"))


def save_package(name: str, module: nn.Module, folder: Path) -> None:
    inductor.use_toolkit()
    rows = torch.export.Dim("rows", min=2, max=32)
    with torch.no_grad(), twins.placed(module.eval(), "cuda"):
        program = torch.export.export(module, (torch.randn(8, 64, device="cuda"),), dynamic_shapes=({0: rows},))
        with twins.compiling(program):
            # Its settings bring LibTorch's CUDA part by the worker's module.
            inductor.compile_package(program, folder / f"{name}.pt2")


#: Packages that the exporter makes for this GPU: where the model comes from, its options, and the
#: modules without which its tests are skipped.
GENERATING = {
    "tiny_generate": ("scripts/models/make_test_models.py:tiny_generate", ["--buckets", "64,256"], ["transformers"]),
    "tiny_higgs": ("tests/python/export/tiny_models.py:higgs_audio_v2", ["--family", "higgs_audio_v2", "--length", "128", "--buckets", "64,128"], ["transformers"]),
    "tiny_t3": ("tests/python/export/tiny_models.py:chatterbox_t3", ["--family", "chatterbox_t3", "--length", "128", "--buckets", "64,128"],
                ["transformers", "chatterbox", "einops"]),
}  # fmt: skip


def make_generating(name: str, folder: Path) -> None:
    source, options, needed = GENERATING[name]
    if missing := [module for module in needed if importlib.util.find_spec(module) is None]:
        print(f"{name}: not made, for want of {', '.join(missing)}", file=sys.stderr)
        return
    command = [sys.executable, "-m", "bulkhead.export", str(ROOT / source), str(folder / name), "--device", "cuda", "--slots", "4", *options]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/clients/python:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as export:
        assert export.stdout is not None
        for line in export.stdout:  # as it comes: exports run side by side
            print(f"{name}: {line}", end="", file=sys.stderr, flush=True)
    if export.returncode != 0:
        raise subprocess.CalledProcessError(export.returncode, command)


def made(name: str, make: Callable[[], object]) -> bool:
    """What is not made, or gives other tokens than its model, is told: the tests of all others
    run nevertheless."""
    try:
        make()
    except Exception:
        traceback.print_exc()
        print(f"{name}: its export failed", file=sys.stderr)
        return False
    return True


#: Too large to be carried: made on the machine itself.
LARGE: dict[str, Callable[[], nn.Module]] = {"heavy": Heavy, "swapped": lambda: Heavy(256 << 20)}
TORCHSCRIPT: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "tokens": Tokens,
    "echo": Echo,
    "scale_out": ScaleOut,
    "noise": Noise,
    "host_read": HostRead,
    "host_read_noise": HostReadNoise,
    "cpu_born": CpuBorn,
    "rebinds": Rebinds,
    "writes_input": WritesInput,
    "slow": Slow,
}
PACKAGES = ["mlp.pt2", *GENERATING]


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def main() -> int:
    every = [*(f"{name}.pt" for name in (*TORCHSCRIPT, *LARGE)), *PACKAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(every))
    options = parser.parse_args()
    if unknown := set(options.names) - set(every):
        parser.error(f"no model is called {', '.join(sorted(unknown))}")
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    has_gpu = torch.cuda.is_available()
    names = options.names or [name for name in every if has_gpu or name.removesuffix(".pt") in TORCHSCRIPT]
    maker = hashlib.sha256(Path(__file__).read_bytes()).hexdigest() + " " + torch.__version__
    stamps = {name: folder / f".{name}.made-by" for name in names}
    wanted = [name for name in names if not (folder / name).exists() or not stamps[name].exists() or stamps[name].read_text() != maker]
    if (packages := [name for name in wanted if name in PACKAGES]) and not has_gpu:
        sys.exit(f"no GPU here, which {', '.join(packages)} would be compiled for")
    for name in wanted:
        if name not in PACKAGES:
            plain = name.removesuffix(".pt")
            save_torchscript(plain, drawn((TORCHSCRIPT | LARGE)[plain]), folder)
            stamps[name].write_text(maker)
    with ThreadPoolExecutor(len(GENERATING)) as side_by_side:
        generating = {name: side_by_side.submit(made, name, lambda name=name: make_generating(name, folder)) for name in packages if name in GENERATING}
        exported = {"mlp.pt2": made("mlp.pt2", lambda: save_package("mlp", drawn(Mlp), folder))} if "mlp.pt2" in packages else {}
        exported |= {name: each.result() for name, each in generating.items()}
    for name, whole in exported.items():
        if whole and (folder / name).exists():
            stamps[name].write_text(maker)
    return 0 if all(exported.values()) else NOT_ALL


if __name__ == "__main__":
    sys.exit(main())
