"""Longest rows of QLoRA on Llama-3.1-8B by card, with and without --long_rows, and the tensors of such a step.

    python benchmarks/long_rows.py            # prints the page
    python benchmarks/long_rows.py --write    # writes benchmarks/results/long_rows.md

The lengths are the planner's. The tensors are counted in a step of the real model code at the real widths, with fewer
layers and with tensors that have shapes but no values (as in `accel-scale plan --verify` on a CPU).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup
from accel_scale.planning.search.questions import longest_rows
from accel_scale.planning.search.requests import build_request
from accel_scale.planning.search.wish import Wish
from accel_scale.planning.tape.activations import step_bytes

MODEL = "meta-llama/Llama-3.1-8B"
PAGE = Path(__file__).parent / "results" / "long_rows.md"
# https://unsloth.ai/blog/llama3-3: Llama 3.1 8B, QLoRA of rank 32 on all linears, one row.
PUBLISHED = {12: 21_848, 16: 40_724, 24: 78_475, 40: 153_977, 48: 191_728, 80: 342_733}
WIDTHS = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
MEASURED = ((2, 16_384, False), (2, 16_384, True))
_GIB = 2**30


def wish(card_gib: int, long_rows: bool) -> Wish:
    """The planner's request; without the flag, offloading layer inputs is the leanest alternative."""
    return Wish(
        MODEL,
        gpu=f"{card_gib}GiB",
        method="qlora",
        optim="paged_adamw_8bit",
        checkpointing_policy="offload",
        attn_implementation="flash_attention_2",
        long_rows=str(long_rows).lower(),
        lora_r="32",
        lora_dropout="0",
        strategy=("one GPU",),
    )


def lengths_table() -> list[str]:
    lines = [
        "| card | without | with `--long_rows` | published | ratio | host memory |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for card, published in PUBLISHED.items():
        plain, long = (longest_rows(build_request(wish(card, on))) for on in (False, True))
        assert long.best is not None
        memory, length = long.best.memory, long.request.sequence_length
        lines.append(
            f"| {card} GiB | {plain.request.sequence_length:,} | **{length:,}** | {published:,} | "
            f"{length / published:.1f} × | {memory.host_bytes / _GIB:.0f} GiB |"
        )
    return lines


def tensors_table() -> list[str]:
    from transformers import LlamaConfig

    from accel_scale.verifying.trial_step import measure_step

    lines = ["| layers | tokens | `--long_rows` | measured | predicted |", "|---:|---:|---|---:|---:|"]
    for layers, tokens, long_rows in MEASURED:
        config = LlamaConfig(num_hidden_layers=layers, **WIDTHS)
        setup = TrainingSetup(
            method="qlora",
            checkpointing="offload",
            long_rows=long_rows,
            packing=False,
            sequence_length=tokens,
            lora=LoraSetup(32),
        )
        measured = measure_step(config, setup, is_fake=True).pass_bytes
        facts = facts_from_config(config.to_dict(), name="llama")
        predicted = step_bytes(facts, setup, is_cuda=False, is_tracked=True).peak_bytes
        lines.append(
            f"| {layers} | {tokens:,} | {'yes' if long_rows else 'no'} | {measured / _GIB:.3f} GiB | "
            f"{predicted / _GIB:.3f} GiB ({predicted / measured - 1:+.2%}) |"
        )
    return lines


def bytes_per_token() -> str:
    """Bytes that a token of a row adds to the peak on a card."""
    facts = load_model_facts(MODEL)
    setup = TrainingSetup(method="qlora", checkpointing="offload", attention="flash_attention_2", lora=LoraSetup(32))

    def each(long_rows: bool) -> float:
        few, many = (
            step_bytes(facts, replace(setup, long_rows=long_rows, sequence_length=tokens)).peak_bytes
            for tokens in (65_536, 131_072)
        )
        return (many - few) / 65_536 / 1024

    return f"{each(True):.0f} KiB a token with the flag, {each(False):.0f} KiB without"


def page() -> str:
    lines = [
        "# Longest rows by card",
        "",
        "`python benchmarks/long_rows.py --write`. QLoRA of Llama-3.1-8B, adapters of rank 32 on all linears, no "
        "dropout, paged 8-bit AdamW, FlashAttention, one row at a time. A length is the longest multiple of 256 for "
        "which the **upper end** of the planner's interval fits the card: predicted, not run on a GPU.",
        "",
        *lengths_table(),
        "",
        "*without*: layer inputs offloaded to the host too, but MLPs and norms whole. *published*: by "
        "[unsloth](https://unsloth.ai/blog/llama3-3) for the same model and rank, measured on cards. Host "
        "memory is for the layers' inputs, which are pinned: torch "
        "rounds each of the 32 blocks up to a power of two. The model was made for 131,072 tokens; longer rows need "
        "other rotary settings.",
        "",
        f"The peak grows by {bytes_per_token()}.",
        "",
        "## Tensors of a step at these widths",
        "",
        "The real model's code at full width with few layers, bf16 autocast and SDPA on a CPU, every tensor counted "
        "and none computed: the highest sum of tensors during forward and backward pass, without weights.",
        "",
        *tensors_table(),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())


if __name__ == "__main__":
    main()
