"""ChatterBox of the true classes with small random weights, in two parts: tokens by T3's loop,
sound by S3Gen (flow, masks, embeddings, vocoder)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent.parent / "engines"))
from chatterbox.models.t3 import T3  # noqa: E402
from chatterbox.models.t3.modules.cond_enc import T3Cond  # noqa: E402
from chatterbox.tts import S3Gen  # noqa: E402
from small_chatterbox import small_sizes  # noqa: E402

PACKAGE = "chatterbox"


def tokens(t3: T3, text: torch.Tensor, speaker: torch.Tensor, prompt: torch.Tensor, emotion: torch.Tensor) -> torch.Tensor:
    cond = T3Cond(speaker_emb=speaker, cond_prompt_speech_tokens=prompt, emotion_adv=emotion).to(device=t3.device)
    return t3.inference(t3_cond=cond, text_tokens=text, max_new_tokens=3)


def sound(s3gen: S3Gen, speech: torch.Tensor, reference: dict[str, Any]) -> torch.Tensor:
    with torch.inference_mode():
        return s3gen.inference(speech_tokens=speech, ref_dict=dict(reference), n_cfm_timesteps=3)[0]


def of_tokens(device: Any) -> tuple[Any, ...]:
    with small_sizes():
        t3 = T3().eval().to(device)
    text = torch.tensor([[255, 11, 12, 13, 0]] * 2, device=device)
    return t3, text, torch.randn(1, 256, device=device), torch.randint(0, 6561, (1, 150), device=device), torch.full((1, 1, 1), 0.5, device=device)


def of_sound(device: Any) -> tuple[Any, ...]:
    with small_sizes():
        s3gen = S3Gen().eval().to(device)
    reference = {
        "prompt_token": torch.randint(0, 6561, (1, 10), device=device),
        "prompt_token_len": torch.tensor([10], device=device),
        "prompt_feat": torch.randn(1, 20, 80, device=device),
        "prompt_feat_len": None,
        "embedding": torch.randn(1, 192, device=device),
    }
    return s3gen, torch.randint(0, 6561, (12,), device=device), reference


PARTS = [(tokens, of_tokens), (sound, of_sound)]
