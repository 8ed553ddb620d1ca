"""Runs that cannot learn, or have learnt nothing, end as errors: because of their data, length or steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from accel_scale.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("flags", "place", "words"),
    [
        ("--max_length 12", "--max_length", "no training row, cut to 12 tokens"),
        ("--max_length 12 --packing false", "--max_length", "no training row, cut to 12 tokens"),
        ("--max_length 1", "--max_length", "cannot be 1"),
        ("--max_steps 0", "--max_steps", "cannot be 0"),
        ("--max_steps -5", "--max_steps", "cannot be -5"),
        ("--num_train_epochs 0", "--num_train_epochs", "cannot be 0"),
        ("--max_length 12 --packing false --dataset_streaming", "--dataset_name", "without a step"),
        ("--max_length 12 --dataset_streaming --max_steps 9", "--max_length", "no row of the first 8 steps"),
        ("--learning_rate 1e12 --max_steps 4", "--guard", "did not take 3 of the 4 steps"),
        ("--learning_rate 1e12 --max_steps 4 --guard off", "--learning_rate", "weights that are not finite"),
        ("--learning_rate 1e-30", "--learning_rate", "no weight has changed"),
    ],
)
def test_a_run_that_learns_nothing_is_refused(sft: Any, flags: str, place: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        sft(flags, out=tmp_path / "out")
    assert words in caught.value.problem
    assert caught.value.place == place
    assert caught.value.fix
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("how", ["", "--dataset_streaming"])
def test_evaluation_rows_without_labels_are_refused(sft: Any, small_gsm8k: Path, tmp_path: Path, how: str) -> None:
    rows = [json.loads(line) for line in small_gsm8k.read_text().splitlines()]
    for row in rows[40:]:
        row["question"] *= 40
    for name, part in (("train", rows[:40]), ("test", rows[40:])):
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / "rows" / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in part) + "\n")
    with pytest.raises(ConfigError, match="no evaluation row, cut to 256 tokens"):
        sft(f"--eval_strategy steps --eval_steps 2 {how}", data=tmp_path / "rows", out=tmp_path / "out")
    metrics = tmp_path / "out" / "metrics.jsonl"
    assert not metrics.is_file() or "eval_loss" not in metrics.read_text()


def test_a_row_of_nan_is_skipped_by_default_and_the_weights_stay_finite(
    sft_module: Any, shared_data: Path, small_gsm8k: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = tmp_path / "base"
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "stories260k")
    model = AutoModelForCausalLM.from_pretrained(shared_data / "stories260k")
    model.config.tie_word_embeddings = False  # otherwise every logit would be NaN
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    token = tokenizer.convert_tokens_to_ids("Z")
    assert token != tokenizer.unk_token_id
    model.get_input_embeddings().weight.data[token] = float("nan")
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    rows = [json.loads(line) for line in small_gsm8k.read_text().replace("Z", "z").splitlines()]
    rows[5]["question"] = "Z" + rows[5]["question"]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    flags = f"--model_name_or_path {base} --dataset_name {data} --columns prompt=question completion=answer"
    flags += f" --precision fp32 --max_length 256 --packing false --num_train_epochs 1 --output_dir {tmp_path / 'out'}"
    summary = sft_module.main([*flags.split(), "--per_device_train_batch_size", "4", "--save_strategy", "no"])
    assert summary["guard"] == {"policy": "skip", "events": 1}
    after = load_file(tmp_path / "out" / "model.safetensors")
    after["model.embed_tokens.weight"][token] = 0  # as it was loaded
    assert all(tensor.isfinite().all() for tensor in after.values())
