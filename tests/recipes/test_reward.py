"""recipes/reward.py trains like TRL's own script, and what it saves loads as a reward model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.scripts
from pairs import write_pairs
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.flags.parsing import parse_flags
from accel_scale.merging.adapter import merge_adapter
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
from accel_scale.modeling.loading import load_config, load_model
from accel_scale.modeling.model_class import as_reward_model
from accel_scale.recipe_specs.trl import REWARD
from accel_scale.rehearsing.reload import compare_final_folders
from accel_scale.start_check.check import check_start
from accel_scale.start_check.plan import PlannedRun

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 8


def run(script: Path, folder: Path, *flags: str) -> list[float]:
    words = [
        *("--model_name_or_path", default_model_path(), "--dataset_name", str(folder.parent / "pairs")),
        *("--max_steps", str(STEPS), "--per_device_train_batch_size", "2", "--learning_rate", "1e-4"),
        *("--lr_scheduler_type", "constant", "--warmup_steps", "0", "--seed", "7", "--max_length", "128"),
        *("--logging_steps", "1", "--save_strategy", "steps", "--save_steps", str(STEPS)),
        *("--center_rewards_coefficient", "0.01", "--output_dir", str(folder), *flags),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def scores(model: Any) -> list[float]:
    """Scores of two rows, each on its own."""
    rows = torch.arange(10, 40).view(2, 15)
    with torch.no_grad():
        return [model.eval()(input_ids=row[None]).logits.item() for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_losses_are_those_of_trls_script_and_what_is_saved_scores_as_it_did(tmp_path: Path, adapters: bool) -> None:
    write_pairs(tmp_path / "pairs")
    lora = ["--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj", "--lora_dropout", "0"]
    given = lora if adapters else []
    ours = run(
        REPOSITORY / "recipes/reward.py", tmp_path / "ours", "--precision", "fp32", "--fused_kernels", "off", *given
    )
    plain = ["--dtype", "float32", "--bf16", "false", "--use_cpu", "--report_to", "none"]
    given = [*lora, "--lora_task_type", "SEQ_CLS"] if adapters else []
    theirs = run(Path(trl.scripts.__file__).with_name("reward.py"), tmp_path / "theirs", *plain, *given)
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert len(set(ours)) > 2, "something is learnt"
    summary = json.loads((tmp_path / "ours" / "run_summary.json").read_text())
    assert (summary["recipe"], summary["steps"], len(summary["preferred"])) == ("reward.py", STEPS, STEPS)
    assert "trained" in compare_final_folders(
        start=Path(default_model_path()), uninterrupted=tmp_path / "ours", resumed=None
    )
    load = AutoModelForSequenceClassification.from_pretrained
    if not adapters:
        expected = scores(load(tmp_path / "theirs", dtype=torch.float32))
        assert scores(load(tmp_path / "ours", dtype=torch.float32)) == pytest.approx(expected, abs=1e-5)
        assert load(tmp_path / "ours").config.pad_token_id is not None
        return
    loaded = PeftModel.from_pretrained(
        load(default_model_path(), num_labels=1, dtype=torch.float32), tmp_path / "ours"
    )
    other = PeftModel.from_pretrained(
        load(default_model_path(), num_labels=1, dtype=torch.float32), tmp_path / "theirs"
    )
    expected = scores(loaded)
    assert scores(other) == pytest.approx(expected, abs=1e-5)
    result = merge_adapter(tmp_path / "ours", tmp_path / "merged", dtype="float32")
    assert result.num_replaced_tensors == 1, "the head of scores"
    assert result.max_logit_diff is not None
    merged = load(tmp_path / "merged", dtype=torch.float32)
    assert scores(merged) == pytest.approx(expected, abs=1e-4)
    assert (merged.config.num_labels, merged.config.pad_token_id) == (1, loaded.config.pad_token_id)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", [4, pytest.param(0, marks=pytest.mark.soak)])
def test_no_flags_learn_to_rank_held_out_pairs(steps: int, tmp_path: Path) -> None:
    """`make reward`; the soaks run it in full."""
    given = ["--max_steps", str(steps), "--eval_steps", str(steps)] if steps else []
    command = [sys.executable, str(REPOSITORY / "recipes/reward.py"), "--output_dir", str(tmp_path), *given]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ranked right" in done.stdout
    ranked = json.loads((tmp_path / "run_summary.json").read_text())["ranked"]
    assert 0.35 < ranked["before"] < 0.65
    if steps:
        assert ranked["step"] == steps
    else:
        assert ranked["after"] >= 0.9


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--long_rows", "true"], "long_rows"),
        (["--exact_match_samples", "5"], "exact_match_samples"),
        (["--pad_token", "<pad>"], "pad_token"),
        (["--chat_template_path", "some/model"], "chat_template_path"),
        (["--lora_modules_to_save", "lm_head"], "lora_modules_to_save"),
        (["--packing", "true"], "packing"),
        (["--padding_free", "true"], "padding_free"),
    ],
)
def test_what_is_not_done_for_scores_is_refused(flags: list[str], named: str) -> None:
    given = ["--model_name_or_path", "m", "--dataset_name", "d", *flags]
    with pytest.raises(ConfigError) as refused:
        REWARD.refuse(parse_flags(REWARD.flags, given, program="reward.py"))
    assert named in refused.value.one_line()


# ── Which model is which ─────────────────────────────────────────────────────────────────────────────────────────────

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def test_a_head_is_added_to_a_language_model_and_kept_of_a_reward_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = load_model(default_model_path(), dtype=torch.float32, rewards=True)
    assert (type(made), made.score.weight.shape[0]) == (LlamaForSequenceClassification, 1)
    made.save_pretrained(tmp_path / "rewards")
    again = load_model(str(tmp_path / "rewards"), dtype=torch.float32, rewards=True)
    assert again.score.weight.equal(made.score.weight)
    with pytest.raises(ConfigError, match="scores rows"):
        load_config(str(tmp_path / "rewards"))
    kept = {name: tensor for name, tensor in made.state_dict().items() if name != "score.weight"}
    made.save_pretrained(tmp_path / "rewards", state_dict=kept)
    with pytest.raises(ConfigError, match=r"not in it \(score\.weight\)"):
        load_model(str(tmp_path / "rewards"), dtype=torch.float32, rewards=True)
    made.save_pretrained(
        tmp_path / "rewards", state_dict={**made.state_dict(), "scores.weight": made.score.weight * 2}
    )
    with pytest.raises(ConfigError, match=r"not in the model \(scores\.weight\)"):
        load_model(str(tmp_path / "rewards"), dtype=torch.float32, rewards=True)


def test_a_classifier_with_several_classes_is_refused(tmp_path: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(num_labels=3, **TINY)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="3 classes"):
        load_config(str(tmp_path), rewards=True)


# ── Start check ──────────────────────────────────────────────────────────────────────────────────────────────────────


def planned(**changes: Any) -> PlannedRun:
    config = LlamaConfig(**TINY)
    as_reward_model(config, name="tiny")
    run = PlannedRun(config, "sdpa", rows="padded", policy=CheckpointingPolicy("none"), rewards=True)
    return dataclasses.replace(run, **changes)


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_the_twin_of_a_reward_model_is_checked(policy: str) -> None:
    verdict = check_start(planned(policy=CheckpointingPolicy(policy)))
    assert (verdict.notes, verdict.untrained, verdict.loss_from_logits) == ((), (), False)


def test_a_score_read_at_padding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_the_end(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> SequenceClassifierOutputWithPast:
        hidden = self.model(input_ids, attention_mask=kwargs["attention_mask"], use_cache=False).last_hidden_state
        return SequenceClassifierOutputWithPast(logits=self.score(hidden)[:, -1])

    monkeypatch.setattr(LlamaForSequenceClassification, "forward", at_the_end)
    with pytest.raises(ConfigError, match="padded rows otherwise than each row by itself"):
        check_start(planned())


def test_a_head_that_no_gradient_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = LlamaForSequenceClassification.__init__

    def frozen(self: Any, config: LlamaConfig) -> None:
        own(self, config)
        self.score.weight.requires_grad_(False)

    monkeypatch.setattr(LlamaForSequenceClassification, "__init__", frozen)
    with pytest.raises(ConfigError, match="head of scores"):
        check_start(planned())
