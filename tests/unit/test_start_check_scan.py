"""The committed scan of every causal model: the page matches its results, and some of them are run again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import start_check_scan as scan  # noqa: E402

from accel_scale.modeling.fsdp2_preparation import mend_fsdp2_preparation  # noqa: E402
from accel_scale.modeling.loading import skeleton_of  # noqa: E402
from accel_scale.start_check.twin import tiny_config, undisturbed  # noqa: E402

RESULTS = json.loads(scan.RESULTS.read_text(encoding="utf-8"))
# Packed and refused, windowed, capped, scaled, mixtures, state space, a multi-layer head, positions in the bias.
AGAIN = ("llama", "gemma2", "cohere2", "qwen3_moe", "mamba2", "bert", "bloom", "deepseek_v3")


def test_the_page_is_what_the_results_say() -> None:
    page = scan.TABLE.read_text(encoding="utf-8")
    assert page.split(scan.BEGIN)[1].split(scan.END)[0].strip() == scan.table(RESULTS).strip()


def test_every_architecture_that_builds_is_equal_or_refused() -> None:
    """In one process and under FSDP2, with full weights and LoRA; its documents are isolated or refused."""
    built = {name: found for name, found in RESULTS["architectures"].items() if scan.builds_small(found)}
    assert len(built) >= 140
    for name, found in built.items():
        assert found["packing"] == "isolated" or found["packing"].startswith("refused: "), name
        for key in ("full", "lora", "full_fsdp2", "lora_fsdp2"):
            assert found[key] in ("equal", "own logits") or found[key].startswith("refused: "), (name, key)
        for key in ("checkpointing_full", "checkpointing_selective"):
            assert found[key] in ("equal", "not run") or found[key].startswith("refused: "), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("name", AGAIN)
def test_a_scanned_architecture_is_found_the_same_again(name: str) -> None:
    with undisturbed():
        config = dict(scan.architectures())[name]
        recorded = RESULTS["architectures"][name]
        found = scan.check_architecture(config) | scan.check_policies(config, recorded)
    assert found == {key: value for key, value in recorded.items() if not key.endswith("_fsdp2")}


@pytest.mark.slow
def test_a_head_of_its_own_shares_a_group_with_a_module_before_it_in_every_architecture() -> None:
    """Otherwise FSDP2 leaves each rank's own gradient on it if a fused loss uses its weight without a call."""
    from accelerate.utils import fsdp_utils

    mend_fsdp2_preparation()
    looked_at, alone = 0, []
    with undisturbed():
        for name, config in scan.architectures():
            try:
                model = skeleton_of(tiny_config(config))
            except Exception:  # it does not build; the scan says why
                continue
            head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
            if head is None or embedding is None or head.weight is embedding.weight:
                continue
            looked_at += 1
            if fsdp_utils._find_final_norm(model) is None:
                alone.append(name)
    assert looked_at >= 90
    assert alone == []
