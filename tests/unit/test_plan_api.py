"""The Python functions `plan` and `predict_memory` give the same answers as the command."""

from __future__ import annotations

import json

import pytest

from accel_scale import ConfigError, plan, predict_memory
from accel_scale.cli.main import main


def test_the_same_answer_as_the_command(capsys):
    words = ["--gpu", "H100", "--num_gpus", "8", "--max_length", "4096", "--strategy", "FSDP2", "--json"]
    assert main(["plan", "Qwen/Qwen3-8B", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    found = plan("Qwen/Qwen3-8B", gpu="H100", num_gpus=8, max_length=4096, strategy="FSDP2")
    assert found.best is not None
    assert len(found.candidates) == len(said["candidates"])
    assert round(found.best.memory.device_bytes) == said["candidates"][0]["memory"]["device_bytes"]


def test_memory_of_what_fits_and_of_what_comes_nearest():
    settings = {"method": "qlora", "global_batch_size": 8, "max_length": 2048}
    fits = predict_memory("Qwen/Qwen3-8B", gpu="24GiB", **settings)
    assert fits.low_bytes < fits.device_bytes < fits.high_bytes <= 24 * 2**30
    missed = predict_memory("meta-llama/Llama-3.1-70B", gpu="24GiB", **settings)
    assert missed.high_bytes > 24 * 2**30


def test_lists_switches_and_numbers_are_read_as_on_the_command_line():
    found = plan("Qwen/Qwen3-8B", gpu="H100", packing=False, method="lora", lora_target_modules=["q_proj"], lora_r=8)
    assert found.best is not None
    assert found.best.setup.lora.rank == 8
    assert not found.best.setup.packing
    assert found.request.global_batch_size == 64


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gpus": "H100"}, r"no setting 'gpus'. Fix: did you mean gpu\?"),
        ({"gpu": "H100", "max_length": -1}, "--max_length: '-1' is not a whole number"),
        ({"gpu": "H100", "method": "lorra"}, "did you mean lora"),
    ],
)
def test_what_is_wrong_is_named(settings, said):
    with pytest.raises(ConfigError, match=said):
        plan("Qwen/Qwen3-8B", **settings)
