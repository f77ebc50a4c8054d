"""Makes the small models of the tests: make_test_models.py FOLDER (usually build/models/test).

Each shows one behaviour of a model. Idempotent: made again when this file, the exporter or torch
has changed.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import aoti

HERE = Path(__file__).resolve().parent


def torchscript_models() -> dict:
    import torch
    from torch import Tensor, nn

    class Echo(nn.Module):
        """Returns its input itself: what lies where the result lies is the input."""

        def forward(self, x: Tensor) -> Tensor:
            return x

    class Clone(nn.Module):
        """Allocates a result as large as its input."""

        def forward(self, x: Tensor) -> Tensor:
            return x.clone()

    class Add(nn.Module):
        def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            return a + scale * b

    class AddOut(nn.Module):
        """Writes its sum where it is told to."""

        def forward(self, a: Tensor, b: Tensor, y: Tensor) -> None:
            torch.add(a, b, out=y)

    class Accumulate(nn.Module):
        """Writes into its second input where it lies."""

        def forward(self, x: Tensor, total: Tensor) -> Tensor:
            total.add_(x)
            return total * 2

    class InPlace(nn.Module):
        """Writes into what it is given, by each method in another way; by `forward` into a copy."""

        def forward(self, x: Tensor) -> Tensor:
            return x.clone().add_(1)

        @torch.jit.export
        def view(self, x: Tensor) -> Tensor:
            x[0].mul_(2)
            return x + 1

        @torch.jit.export
        def out(self, x: Tensor) -> Tensor:
            return torch.add(x, 1, out=x)

        @torch.jit.export
        def sometimes(self, x: Tensor) -> Tensor:
            if bool(x.sum() > 0):
                x.zero_()
            return x + 1

        @torch.jit.export
        def unannounced(self, x: Tensor) -> Tensor:
            """Each of these returns its input, and its schema does not say so."""
            return torch.dropout(x.type_as(x), 0.5, False).add_(1)

        @torch.jit.export
        def unwritten(self, x: Tensor) -> Tensor:
            return x.type_as(x).clone().add_(1)

    class Raises(nn.Module):
        """Refuses negative input, so that the warm-up's zeros pass."""

        def forward(self, x: Tensor) -> Tensor:
            if bool((x < 0).any()):
                raise ValueError("the model refuses negative numbers")
            return x + 1

    class InfiniteLoop(nn.Module):
        """Ends for the warm-up's zeros, never for positive input."""

        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            while bool((y > 0).any()):
                y = torch.abs(y)
            return y

    class Nan(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x - 1.0)  # NaN for every x below 1

    class MultiOutput(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.t(), x.sum()  # not contiguous; of rank 0

        @torch.jit.export
        def halves(self, x: Tensor) -> list[Tensor]:
            return list(torch.chunk(x, 2, dim=0))

    class Slow(nn.Module):
        """As long as asked: `rounds` products of two square matrices."""

        def forward(self, x: Tensor, rounds: int = 1) -> Tensor:
            y = x
            for _ in range(rounds):
                y = torch.tanh(torch.matmul(y, x))
            return y

    class Counter(nn.Module):
        """A state that a reset must clear: adds up what it is given."""

        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.total = self.total + x
            return self.total.clone()

        @torch.jit.export
        def reset(self) -> None:
            self.total = torch.zeros(1)

    modules = (Echo, Clone, Add, AddOut, Accumulate, InPlace, Raises, InfiniteLoop, Nan, MultiOutput, Slow, Counter)
    names = ("echo", "clone", "add", "add_out", "accumulate", "in_place", "raises", "infinite_loop", "nan", "multi_output", "slow", "counter")
    return dict(zip(names, modules, strict=True))


def minilm_halves() -> dict:
    """MiniLM cut in the middle: the first half's outputs are the second one's inputs.

    For 16 tokens, which tracing fixes.
    """
    import minilm
    import torch
    from torch import Tensor, nn

    class Half(nn.Module):
        def __init__(self, layers: nn.ModuleList) -> None:
            super().__init__()
            self.layers = layers

        def through(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
            unseen = (1 - attention_mask[:, None, None, :].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
            for layer in self.layers:
                given = layer(hidden, attention_mask=unseen)
                hidden = given[0] if isinstance(given, tuple) else given
            return hidden

    class Lower(Half):
        def __init__(self, bert: nn.Module) -> None:
            super().__init__(bert.encoder.layer[:3])
            self.embeddings = bert.embeddings

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
            return self.through(self.embeddings(input_ids), attention_mask), attention_mask

    class Upper(Half):
        def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
            return minilm.pooled(self.through(hidden, attention_mask), attention_mask)

    bert = minilm.Embedder().bert
    ids = torch.ones(1, 16, dtype=torch.int64)
    lower, upper = Lower(bert).eval(), Upper(bert.encoder.layer[3:]).eval()
    with torch.no_grad():
        hidden, mask = lower(ids, ids)
        return {
            "minilm_lower": torch.jit.trace(lower, (ids, ids.clone())),
            "minilm_upper": torch.jit.trace(upper, (hidden, mask)),
        }


def linear_out(linear):
    """A module that writes what `linear` returns into its last argument."""
    import torch

    class LinearOut(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> None:
            y.copy_(self.linear(x))

    return LinearOut()


def tiny_generate(length: int = 256, layers: int = 2):
    """A Llama with random weights, wide apart so that greedy tokens have no near ties.

    It is what a generate runtime is tried on.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=length, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tiny_layer():
    """One layer of it, which is soon compiled."""
    return tiny_generate(layers=1)


def tiny_long():
    """The same with sequences so long that a test is over before one of them.

    A step reads all that came before.
    """
    return tiny_generate(length=131072, layers=1)


def tiny_bfloat16():
    """The same in 16 bits, weights and keys and values."""
    return tiny_layer()


#: The functions above, and what their export is told.
GENERATING = {"tiny_generate": [], "tiny_long": [], "tiny_bfloat16": ["--dtype", "bfloat16", "--slots", "2", "--slots-max", "2"]}


def make_generating(folder: Path) -> None:
    command = [sys.executable, "-m", "bulkhead.export", f"{Path(__file__).resolve()}:{folder.name}", str(folder), *GENERATING[folder.name]]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(aoti.CLIENT)}, stdout=sys.stderr)


def make_all(folder: Path) -> None:
    import torch

    scripted = torchscript_models()
    for name, module in scripted.items():
        torch.jit.script(module().eval()).save(str(folder / f"{name}.pt"))

    for name, traced in minilm_halves().items():
        traced.save(str(folder / f"{name}.pt"))

    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 3)
    rows = torch.export.Dim("rows", min=1, max=64)
    with aoti.scratch_beside(folder):
        four = (torch.zeros(4), torch.zeros(4))
        for name in ("add", "accumulate"):
            aoti.export_package(scripted[name](), four, folder / f"{name}.pt2")
        aoti.export_package(linear, (torch.zeros(5, 4),), folder / "linear.pt2", dynamic_shapes=({0: rows},))
        into = (torch.zeros(5, 4), torch.zeros(5, 3))
        aoti.export_package(linear_out(linear), into, folder / "linear_out.pt2", dynamic_shapes=({0: rows}, {0: rows}))
    # The same weights in a runtime that shares no code with the package's.
    torch.jit.script(linear.eval()).save(str(folder / "linear.pt"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models go")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    versions = f"torch=={version('torch')}\ntransformers=={version('transformers')}\n"
    plain = b"".join((HERE / name).read_bytes() for name in ("make_test_models.py", "minilm.py", "aoti.py")) + aoti.SETTINGS.read_bytes()
    made(folder / ".stamp", versions, plain, lambda: make_all(folder))
    for name in GENERATING:
        made(folder / f".{name}.stamp", versions, plain + aoti.export_sources(), lambda name=name: make_generating(folder / name))


def made(record: Path, versions: str, sources: bytes, maker: Callable[[], None]) -> None:
    """Makes what `record` stands for, unless it was made of the same."""
    wanted = f"{versions}{hashlib.sha256(sources).hexdigest()}\n{aoti.cpu_flags()}\n"
    if record.exists() and record.read_text() == wanted:
        print(f"test models, {record.name}: current")
        return
    record.unlink(missing_ok=True)
    maker()
    record.write_text(wanted)
    print(f"test models, {record.name}: made in {record.parent}")


if __name__ == "__main__":
    main()
