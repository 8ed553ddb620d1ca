"""Scripts of the kinds other people write on two processes: one launch of several kinds under each GPU launch file."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from other_scripts import make_model

HERE = Path(__file__).parent
REPLACED = {"optimizer": "adamw_torch_foreach"}
# Strategy → kinds, each with the plugin's fields and the script's own settings.
PLANS: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "ddp": [
        ("grpo", {"global_batch_size": 8, "checkpointing_policy": "full"}, {}),
        ("gan", {"optimizer": "sgd_momentum"}, {}),
        ("trainer", {"optimizer": "adamw_bnb_8bit"}, {"by": "optimizers"}),
        ("loop", {"optimizer": "adamw_bnb_8bit", "global_batch_size": 8}, {}),
    ],
    # What users try who were told to use the CPU; the device is also given in another way.
    "fsdp2": [
        ("dpo", {**REPLACED, "adapter": 2}, {"use_cpu": True, "ddp_backend": "nccl"}),
        ("rloo", {"lr_schedule": "wsd"}, {"tf32": True}),
        ("loop", REPLACED, {}),
    ],
    "zero2": [
        ("sft", {**REPLACED, "global_batch_size": 8}, {"bf16": False}),
        ("trainer", REPLACED, {"by": "optimizers"}),
        ("reward", {"lr_schedule": "wsd"}, {}),
    ],
    "zero3": [("kto", {**REPLACED, "adapter": 2}, {}), ("loop", REPLACED, {})],
}
TYPES = {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", list(PLANS))
def test_two_processes(strategy, tmp_path):
    make_model(tmp_path / "model")
    config = HERE.parents[1] / "accelerate_configs" / f"{strategy}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--num_processes", "2", "--main_process_port", "0", str(HERE / "other_scripts.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path), json.dumps(PLANS[strategy])], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "facts.json").read_text())
    for kind, fields, own in PLANS[strategy]:
        seen = found[kind]
        assert (seen["distributed_type"], seen["num_processes"]) == (TYPES[strategy], 2), kind
        assert seen["mixed_precision"] == "bf16", kind
        assert all(math.isfinite(loss) for loss in seen["losses"]), kind
        if fields.get("optimizer", "").startswith("adamw"):
            assert seen["optimizer"] == "AdamW", kind
        if kind == "loop":
            # The script's warm-up and betas, applied to the new optimizer; a step of several micro-batches holds
            # the rate.
            held = 2 if "global_batch_size" in fields else 1
            rates = seen["rates"][::held][:3]
            assert rates == pytest.approx([0.0, 0.5e-3, 1e-3][: len(rates)])
            assert len(rates) == 4 - held
            assert seen["betas"] == [[0.8, 0.9]]
            assert strategy != "fsdp2" or seen["verified"] == 21
        if own.get("by") == "optimizers":
            assert seen["rates"] == pytest.approx([0.0, 1e-3])
            assert seen["betas"] == [[0.8, 0.9]]
        if "steps" in seen:
            assert seen["rows_per_step"] == fields.get("global_batch_size", 4), kind
            assert (tmp_path / kind / f"checkpoint-{seen['steps']}").is_dir(), kind
        if "adapter" in fields:
            assert seen["second_model"] is False, kind
            assert (tmp_path / kind / f"checkpoint-{seen['steps']}" / "adapter_model.safetensors").is_file()
        if kind == "gan":
            assert seen["verified"] == 6
