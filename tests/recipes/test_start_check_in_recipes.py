"""Both recipes refuse runs that would silently train wrong by a configuration alone: the folders have no weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BloomConfig, PreTrainedConfig

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"Row {n} of a few."}) + "\n" for n in range(40)), encoding="utf-8")
    return path


def folder_of(config: PreTrainedConfig, folder: Path) -> Path:
    """Write a model without weights: its configuration and the embedded tokenizer."""
    config.save_pretrained(folder)
    for file in Path(default_model_path()).glob("*token*"):
        shutil.copy(file, folder)
    return folder


LAUNCHES = {
    "single": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [*(("sft", strategy) for strategy in LAUNCHES), ("pretrain", "fsdp2"), ("pretrain", "zero3")],
)
def test_packing_that_leaks_is_refused_under_every_strategy(
    repository: Path, rows: Path, tmp_path: Path, recipe: str, strategy: str
) -> None:
    """Sharded strategies included: the check uses its own model. Uses subprocesses: a launch changes its process."""
    model = folder_of(BloomConfig(hidden_size=1024, n_layer=24, n_head=16), tmp_path / "bloom")
    own = {
        "sft": f"--model_name_or_path {model} --dataset_name {rows}",
        "pretrain": f"--model_config {model} --data {rows} --max_steps 2 --isolate_documents true",
    }
    flags = f"{own[recipe]} --output_dir {tmp_path / 'out'} --max_length 64"
    command = [sys.executable, str(repository / "recipes" / f"{recipe}.py"), *flags.split()]
    env = {**os.environ, **LAUNCHES[strategy], "PYTHONPATH": str(repository)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    fix = {"sft": "--packing false", "pretrain": "--isolate_documents false"}[recipe]
    assert re.search(rf"lets packed documents see each other.*{fix}", done.stderr.splitlines()[-1])


def test_sft_tells_an_encoder_to_decode(sft_module: Any, rows: Path, tmp_path: Path) -> None:
    model = folder_of(BertConfig(), tmp_path / "bert")
    command = f"--model_name_or_path {model} --dataset_name {rows} --output_dir {tmp_path / 'out'} --packing false"
    with pytest.raises(ConfigError, match=r"not causal.*is_decoder"):
        sft_module.main([*command.split(), "--max_length", "64"])


def test_pretrain_names_its_own_flag(pretrain_module: Any, rows: Path, tmp_path: Path) -> None:
    model = folder_of(BloomConfig(hidden_size=64, n_layer=2, n_head=4), tmp_path / "bloom")
    command = f"--model_config {model} --data {rows} --output_dir {tmp_path / 'out'} --max_length 64 --max_steps 2"
    with pytest.raises(ConfigError, match="--isolate_documents false") as caught:
        pretrain_module.main([*command.split(), "--isolate_documents", "true"])
    assert "--packing" not in str(caught.value)
