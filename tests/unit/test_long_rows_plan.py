"""`--long_rows` from flag to plan: what it sets, what it refuses, and the row lengths it promises on a card."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from accel_scale.cli.main import main
from accel_scale.errors import ConfigError
from accel_scale.facts.device import Device
from accel_scale.facts.loss_chunks import CARD_LOGITS, CPU_LOGITS, chunk_tokens
from accel_scale.flags.library import load_classes
from accel_scale.flags.parsing import parse_flags
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup
from accel_scale.planning.search.changes import as_flag, cheapest_changes
from accel_scale.planning.search.questions import STEP, longest_rows
from accel_scale.planning.search.requests import build_request
from accel_scale.planning.search.wish import Wish
from accel_scale.recipe_specs.trl import SFT
from accel_scale.settings.resolve import resolve
from accel_scale.settings.resolved import LaunchFacts, Resolved

LLAMA = load_model_facts("meta-llama/Llama-3.1-8B", allow_download=False)
QLORA = TrainingSetup(
    method="qlora", optimizer="paged_adamw_8bit", checkpointing="offload", long_rows=True,
    attention="flash_attention_2", lora=LoraSetup(32),
)  # fmt: skip


def resolved(flags: str, device_type: str = "cpu") -> Resolved:
    parsed = parse_flags(load_classes(SFT.flags), flags.split(), program="sft.py")
    return resolve(parsed, LaunchFacts(device=Device(device_type)))


@pytest.mark.parametrize(
    ("flags", "device_type", "label"),
    [
        ("--long_rows true", "cpu", "full, in tiles"),
        ("--long_rows true", "cuda", "offload, in tiles"),
        ("--long_rows true --checkpointing_policy none", "cuda", "none, in tiles"),
        ("--long_rows false", "cuda", "full"),
    ],
)
def test_the_flag_sets_tiles_and_the_policy_that_goes_with_them(flags: str, device_type: str, label: str) -> None:
    assert resolved(flags, device_type).checkpointing.label == label


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--checkpointing_policy selective", "selective checkpointing keeps what whole rows"),
        ("--checkpointing_policy segments", "segments checkpointing keeps what whole rows"),
        ("--label_smoothing_factor 0.1", "needs the logits of whole rows"),
        ("--loss_type dft", "needs the logits of whole rows"),
        ("--precision fp8 --fp8_emulate", "fp8 scales a product by the largest value"),
    ],
)
def test_what_needs_whole_rows_is_refused(flags: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolved(f"--long_rows true {flags}")


def test_chunks_of_the_loss_are_smaller_on_a_card() -> None:
    assert chunk_tokens(CARD_LOGITS, 2**17, long_rows=True) == 2**9
    assert chunk_tokens(CARD_LOGITS, 2**17) == 2**11
    assert chunk_tokens(CPU_LOGITS, 2**12, long_rows=True) == chunk_tokens(CPU_LOGITS, 2**12)


def test_host_memory_of_layer_inputs_is_counted() -> None:
    tokens = 60_000
    estimate = predict_memory(LLAMA, replace(QLORA, sequence_length=tokens))
    one_input = tokens * 4096 * 2
    assert 32 * one_input <= estimate.host_bytes <= 32 * 2 * one_input  # pinned blocks are rounded up to powers of two
    kept = predict_memory(LLAMA, replace(QLORA, sequence_length=tokens, checkpointing="full"))
    assert kept.peak_bytes - estimate.peak_bytes > 28 * one_input


@pytest.mark.slow
def test_the_longest_row_fits_and_the_next_does_not() -> None:
    words = {"method": "qlora", "optim": "paged_adamw_8bit", "strategy": ("one GPU",), "lora_dropout": "0"}
    wish = Wish("meta-llama/Llama-3.1-8B", gpu="24GiB", attn_implementation="flash_attention_2", **words)
    plain, long = (longest_rows(build_request(replace(wish, long_rows=on))) for on in ("false", "true"))
    setup = long.best.setup
    assert setup.long_rows
    assert setup.checkpointing == "offload"
    assert long.request.sequence_length > 5 * plain.request.sequence_length
    limit = long.request.machine.gpu.memory_bytes
    more = predict_memory(LLAMA, replace(setup, sequence_length=setup.sequence_length + STEP))
    assert long.best.memory.high_bytes <= limit < more.high_bytes
    with pytest.raises(ConfigError, match="not even a row of 256 tokens fits"):
        longest_rows(build_request(replace(wish, gpu="4GiB")))


@pytest.mark.slow
def test_the_command_says_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "Qwen/Qwen3-0.6B", "--gpu", "8GiB", "--method", "qlora", "--long_rows", "--longest"]
    assert main([*words, "--strategy", "one GPU"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert int(re.search(r"the longest row that fits: ([\d,]+) tokens", said)[1].replace(",", "")) > 20_000
    assert re.search(r"[\d.]+ [GM]iB of host memory for each GPU", said)
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--max_length", "4096"])


def test_it_is_among_the_changes_that_would_fit() -> None:
    wish = Wish("meta-llama/Llama-3.1-8B", gpu="24GiB", method="qlora", global_batch_size="1")
    setup = replace(QLORA, checkpointing="offload", long_rows=False, sequence_length=60_000)
    changes = [as_flag(flag, changed) for flag, changed in cheapest_changes(build_request(wish), setup)]
    assert "--long_rows true --checkpointing_policy offload" in changes
