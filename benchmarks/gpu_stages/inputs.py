"""Models with random weights and real shapes, and generated documents; needs no network."""

from __future__ import annotations

import json
import random
from pathlib import Path

# hidden, layers, heads, key-value heads, feed-forward, vocabulary, tied: a toy, Qwen2.5-0.5B and 1.5B, Llama-3.1-8B.
SHAPES = {
    "tiny": (64, 4, 4, 2, 128, 2048, True),
    "0.5B": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "8B": (4096, 32, 32, 8, 14_336, 128_256, False),
}


def llama_config(size: str) -> object:
    """A `LlamaConfig` with the shape `size`, for the embedded tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig

    from accel_scale.data.default import default_model_path

    hidden, layers, heads, kv_heads, feed_forward, vocabulary, tied = SHAPES[size]
    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=feed_forward,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=131_072,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def written_model(folder: Path, size: str, device: str) -> Path:
    """A folder with random weights of shape `size` and the embedded tokenizer, created once; bf16 on a GPU."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    from accel_scale.data.default import default_model_path

    path = folder / f"model_{size}"
    if (path / "tokenizer_config.json").is_file():  # written last
        return path
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(llama_config(size))
    model.to(torch.bfloat16 if device == "cuda" else torch.float32).save_pretrained(path)
    AutoTokenizer.from_pretrained(default_model_path()).save_pretrained(path)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return path


def written_documents(folder: Path, num_rows: int) -> Path:
    """Write JSON Lines of documents of 20 to 400 words, distributed like instruction data."""
    folder.mkdir(parents=True, exist_ok=True)
    path, rng = folder / "documents.jsonl", random.Random(0)
    words = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "was", "with", "by", "not", "this")
    lines = []
    for _ in range(num_rows):
        length = min(400, int(rng.lognormvariate(4.4, 0.7)) + 20)
        lines.append(json.dumps({"text": " ".join(rng.choice(words) for _ in range(length))}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path
