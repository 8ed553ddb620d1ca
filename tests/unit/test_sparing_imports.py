"""Modules that a run does not use are not imported, and can still be used later."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from accel_scale.starting.sparing_imports import import_peft_without_bitsandbytes, unwrap_without_deepspeed

import_peft_without_bitsandbytes()
unwrap_without_deepspeed()
from accelerate import Accelerator
from trl import SFTTrainer

layer = torch.nn.Linear(2, 2)
assert Accelerator(cpu=True).unwrap_model(layer) is layer
print(sorted({"bitsandbytes", "deepspeed", "mlflow", "peft"} & set(sys.modules)))
from peft.import_utils import is_bnb_4bit_available, is_bnb_available

print(is_bnb_available(), is_bnb_4bit_available(), "bitsandbytes" in sys.modules)
import deepspeed


class Engine(deepspeed.DeepSpeedEngine):
    def __init__(self):
        torch.nn.Module.__init__(self)
        self.module = layer

    def __del__(self):
        pass


assert Accelerator(cpu=True).unwrap_model(Engine()) is layer
"""


@pytest.mark.slow
def test_a_run_without_deepspeed_and_bitsandbytes_imports_neither() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line[0] in "[TF"][:2] == ["['peft']", "True True True"]
