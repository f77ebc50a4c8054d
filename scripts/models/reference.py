"""What the models' own Python says, to compare Bulkhead's answers with.

  reference.py vad --audio SPEECH.f32 --compare PROBABILITIES.txt
      one probability per 512 samples of raw float32 at 16 kHz; prints the largest difference to
          one probability a line, exit 1 when it is above 1e-4
  reference.py minilm --out DIR "a sentence" …
      writes NAME_input_ids.npy, NAME_attention_mask.npy, NAME_embedding.npy for s0, s1 …
  reference.py similarity --out DIR --ours SUFFIX "a sentence" …
      compares NAME_SUFFIX.npy with NAME_embedding.npy, and prints the sentences' cosine
          similarities by SUFFIX
"""

import argparse
import sys
from pathlib import Path

import numpy

CHUNK = 512
RATE_HZ = 16000
TOLERANCE = 1e-4


def vad(arguments) -> int:
    import silero_vad
    import torch

    samples = torch.from_numpy(numpy.fromfile(arguments.audio, dtype=numpy.float32))
    model = silero_vad.load_silero_vad()
    whole_chunks = samples[: len(samples) // CHUNK * CHUNK].reshape(-1, 1, CHUNK)
    with torch.no_grad():
        probabilities = [model(chunk, RATE_HZ).item() for chunk in whole_chunks]
    ours = numpy.loadtxt(arguments.compare, ndmin=1)
    print(f"{len(ours)} probabilities, the package's own Python differs by at most ", end="")
    return tell_difference(ours, numpy.array(probabilities))


def minilm(arguments) -> int:
    import torch
    import transformers

    import minilm as model

    tokenizer = transformers.AutoTokenizer.from_pretrained(model.folder(), local_files_only=True)
    embedder = model.Embedder().eval()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for index, sentence in enumerate(arguments.sentences):
        tokens = tokenizer(sentence, truncation=True, max_length=model.LENGTH_MAX, return_tensors="pt")
        with torch.no_grad():
            embedding = embedder(tokens["input_ids"], tokens["attention_mask"])
        files = {
            "input_ids": tokens["input_ids"].numpy(),
            "attention_mask": tokens["attention_mask"].numpy(),
            "embedding": embedding.numpy(),
        }
        for what, array in files.items():
            numpy.save(arguments.out / f"s{index}_{what}.npy", array)
    return 0


def similarity(arguments) -> int:
    names = [f"s{index}" for index in range(len(arguments.sentences))]
    ours = numpy.concatenate([numpy.load(arguments.out / f"{name}_{arguments.ours}.npy") for name in names])
    theirs = numpy.concatenate([numpy.load(arguments.out / f"{name}_embedding.npy") for name in names])
    for row, sentence in zip(ours @ ours.T, arguments.sentences, strict=True):
        print("  " + " ".join(f"{value:6.3f}" for value in row) + f"   {sentence}")
    print("  transformers' own BertModel differs by at most ", end="")
    return tell_difference(ours, theirs)


def tell_difference(ours: numpy.ndarray, theirs: numpy.ndarray) -> int:
    if ours.shape != theirs.shape:
        print(f"shapes differ: {list(ours.shape)} and {list(theirs.shape)}")
        return 1
    difference = float(numpy.max(numpy.abs(ours.astype(numpy.float64) - theirs), initial=0.0))
    print(f"{difference:.3g}")
    return 0 if difference <= TOLERANCE else 1  # NaN is not equal to itself


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("vad")
    command.add_argument("--audio", type=Path, required=True)
    command.add_argument("--compare", type=Path, required=True)
    command.set_defaults(run=vad)

    command = commands.add_parser("minilm")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("sentences", nargs="+")
    command.set_defaults(run=minilm)

    command = commands.add_parser("similarity")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--ours", required=True)
    command.add_argument("sentences", nargs="+")
    command.set_defaults(run=similarity)

    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
