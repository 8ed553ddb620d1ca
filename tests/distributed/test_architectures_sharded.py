"""Architectures that engines have trouble with, under FSDP2 and ZeRO-3: buffers, experts, ties, shared layers."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import parity
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from accel_scale.data.default import default_model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_key_value_heads": 4,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
# Three layers share one attention block, which would end up in three groups if nothing prevented it.
SHARED = {
    "num_hidden_layers": 6, "num_key_value_heads": 4, "n_mamba_heads": 4, "mamba_d_state": 8, "chunk_size": 32,
    "layers_block_type": ["linear_attention", "hybrid"] * 3, "num_mem_blocks": 1, "attention_hidden_size": 64,
    "adapter_rank": 4, "mamba_ngroups": 1,
}  # fmt: skip
# Its norms are inside its stacks; none is next to the head.
STACKS = {"num_key_value_heads": 4, "num_layers_per_stack": 1, "head_dim": 8, "H_cycles": 1, "L_cycles": 1}
OWN = {
    "deepseek_v3": LATENT, "zamba2": SHARED, "hrm_text": STACKS,
    "mixtral": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
}  # fmt: skip
METHODS = dict.fromkeys(("deepseek_v3", "gemma3", "hrm_text", "llava", "zamba2"), "full") | {"mixtral": "lora"}
# TRL's own loss, whose fused head uses the weight of an untied head without calling the head.
FLAGS = {name: ["--loss_type", "dft"] for name in ("hrm_text", "llava")}
ALONE = ("mixtral", "zamba2")  # trained by one process as well


def write(kind: str, folder: Path) -> None:
    """Save a tiny model of `kind` with the embedded tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    sizes = {**SIZES, "vocab_size": len(tokenizer)}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    if kind == "llava":
        text = {**sizes, "model_type": "llama", "tie_word_embeddings": False}
        vision = {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
        config = CONFIG_MAPPING[kind](text_config=text, vision_config=vision, image_token_index=600, **special)
        model = AutoModelForImageTextToText.from_config(config)
    elif kind == "gemma3":
        parts = {"vision_config": {**VISION, "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4}
        config = CONFIG_MAPPING[kind](text_config={**sizes, "head_dim": 8}, image_token_index=600, **parts, **special)
        model = AutoModelForImageTextToText.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**sizes, **EXPERTS, **OWN[kind], **special}))
    if kind == "deepseek_v3":  # not all zeros, so that a buffer that is not broadcast is noticed
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor([0.5, -0.5, 0.25, 0.0]))
    model.save_pretrained(folder)
    if kind == "gemma3":
        weights = load_file(folder / "model.safetensors")
        renamed = {re.sub("^vision_tower", "vision_tower.vision_model", name): w for name, w in weights.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})  # as in published checkpoints
    tokenizer.save_pretrained(folder)


@functools.cache
def results(name: str) -> dict[str, parity.Result]:
    """Results of a launch file; for one process, only what is compared with it. Full models use their base's names."""
    if not parity.SHARED_DATA.is_dir():
        pytest.skip(f"real inputs are not there: {parity.SHARED_DATA}")
    with tempfile.TemporaryDirectory(prefix=f"architectures-{name}-") as parent:
        flags = {}
        for kind in ALONE if name == "cpu" else METHODS:
            write(kind, Path(parent) / f"{kind}-base")
            flags[kind] = [*parity.recipe_flags(METHODS[kind], Path(parent)), *FLAGS.get(kind, [])]
            flags[kind][flags[kind].index("--model_name_or_path") + 1] = str(Path(parent) / f"{kind}-base")
        flags["pretraining"] = parity.pretrain_flags(Path(parent) / "mixtral-base", Path(parent))
        found = parity.run_launch(name, flags, Path(parent))
        for kind in flags:
            if METHODS.get(kind) == "full":
                base = load_file(Path(parent) / f"{kind}-base" / "model.safetensors")
                assert sorted(found[kind].weights) == sorted(base), kind
        return found


@pytest.mark.parametrize("kind", METHODS)
def test_fsdp2_trains_what_zero3_trains(kind: str) -> None:
    """Both read back what they saved: a tied head that the file lacks does not count as missing."""
    difference = parity.compare(results("fsdp2")[kind], results("zero3")[kind])
    assert difference.loss <= parity.TOLERANCE
    assert difference.weight <= parity.TOLERANCE


@pytest.mark.parametrize("kind", [*ALONE, "pretraining"])
@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
def test_ranks_train_what_one_process_trains(name: str, kind: str) -> None:
    """With a heavy auxiliary loss, with reentrant recomputation under ZeRO-3, and with shared layers."""
    difference = parity.compare(results(name)[kind], results("cpu")[kind])
    assert difference.loss <= parity.TOLERANCE
    assert difference.weight <= parity.TOLERANCE


def test_the_experts_biases_are_saved_as_they_were_loaded() -> None:
    weights = results("fsdp2")["deepseek_v3"].weights
    biases = [tensor for name, tensor in weights.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 1
    assert biases[0].tolist() == [0.5, -0.5, 0.25, 0.0]
