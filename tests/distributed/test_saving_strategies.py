"""Checkpoints and final folders under every kind of sharding: read back, resumed, loaded by `from_pretrained`."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import parity
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

METHODS = ("full", "lora", "qlora")
# Launch file and changes to it, for every way in which the libraries write a checkpoint.
VARIANTS = {
    "ddp": ("ddp", []),
    "fsdp2": ("fsdp2", []),
    "fsdp2 sharded": ("fsdp2", ["--fsdp_state_dict_type", "SHARDED_STATE_DICT"]),
    "zero2": ("zero2", []),
    "zero3": ("zero3", []),
    "zero3 without gathering": ("zero3", ["--zero3_save_16bit_model", "false"]),
}
# Whole tensors on every rank are the easy case, and ZeRO-3's formats are the harder ones among ZeRO's.
LONG = ("ddp", "zero2", "zero3 without gathering")
CHOSEN = [pytest.param(name, marks=[pytest.mark.soak] if name in LONG else []) for name in VARIANTS]


@functools.cache
def outcome(variant: str) -> tuple[Path, dict[str, dict]]:
    """One launch of `variant`: the folder of its runs, and the report of each method."""
    name, changes = VARIANTS[variant]
    folder = parity.folder_until_exit("saving-")
    runs = [
        {
            "recipe": str(Path(__file__).with_name("saving_run.py")),
            "argv": ["--base", str(base()), "--method", method, "--output_dir", str(folder / method)],
            "log": str(folder / f"{method}.log"),
        }
        for method in METHODS
    ]
    (folder / "runs.json").write_text(json.dumps(runs))
    (command,) = parity.launch_commands(name, folder)
    script = [str(Path(__file__).with_name("run_recipe_forked.py")), str(folder / "runs.json")]
    parity._run_all([[*command, *changes, *script]], folder)
    return folder, {method: json.loads((folder / method / "report.json").read_text()) for method in METHODS}


def base() -> Path:
    if not parity.SHARED_DATA.is_dir():
        pytest.skip(f"real inputs are not there: {parity.SHARED_DATA}")
    return parity.SHARED_DATA / "stories260k"


def load(folder: Path, method: str, **settings):
    loader = AutoModelForCausalLM if method == "full" else AutoPeftModelForCausalLM
    return loader.from_pretrained(folder, **settings)


@pytest.mark.parametrize("variant", CHOSEN)
def test_first_checkpoint_is_read_back_exactly(variant):
    _, reports = outcome(variant)
    for method, report in reports.items():
        found = report["checkpoint"]
        if variant == "zero3 without gathering" and method == "full":
            assert found["source"] == "DeepSpeed shards, not compared"
            continue
        assert found["max_abs_diff"] == 0.0
        assert report["last"] == {**found, "seconds": report["last"]["seconds"]}
        # Formats gathered from shards store the tied embedding under both names.
        assert found["num_tensors"] in ((47, 48) if method == "full" else (20,)), method
        expected = "model.safetensors" if method == "full" else "adapter_model.safetensors"
        assert found["source"] == ("pytorch_model_fsdp_0" if variant == "fsdp2 sharded" else expected)


@pytest.mark.parametrize("variant", CHOSEN)
def test_one_flipped_bit_is_caught_on_every_rank(variant):
    _, reports = outcome(variant)
    for method, report in reports.items():
        if variant == "zero3 without gathering" and method == "full":
            continue
        assert report["corrupted"].count("differs by up to") == 1, (method, report["corrupted"])
        assert report["caught_everywhere"]


@pytest.mark.parametrize("variant", CHOSEN)
def test_a_killed_run_resumes_to_the_same_end(variant):
    _, reports = outcome(variant)
    for method, report in reports.items():
        assert report["checkpoints"] == ["checkpoint-2", "checkpoint-4"], method
        assert len(report["losses"]) == 4
        assert report["resumed_losses"] == pytest.approx(report["losses"], rel=1e-5), method


@pytest.mark.parametrize("variant", CHOSEN)
@pytest.mark.parametrize("method", METHODS)
def test_final_folder_loads_and_equals_ddps(variant, method):
    folder, reports = outcome(variant)
    assert reports[method]["final"]["max_abs_diff"] == 0.0
    reference, _ = outcome("ddp")
    model, expected = load(folder / method, method), load(reference / method, method)
    state = expected.state_dict()
    assert model.dtype == torch.float32
    assert model.state_dict().keys() == state.keys()
    moved = AutoModelForCausalLM.from_pretrained(base()).state_dict()
    changed = [name for name, tensor in state.items() if name not in moved or not torch.equal(moved[name], tensor)]
    assert len(changed) > 15
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-3, atol=1e-5, msg=name)
    tokenizer = AutoTokenizer.from_pretrained(folder / method)
    ids = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    logits = model(input_ids=ids).logits
    torch.testing.assert_close(logits, expected(input_ids=ids).logits, rtol=1e-3, atol=1e-3)
    if method == "full":
        assert model.generation_config.eos_token_id == 2
        half = load(folder / method / "half", method)
        assert half.dtype == torch.bfloat16
        assert torch.equal(half.model.norm.weight, model.model.norm.weight.bfloat16())
