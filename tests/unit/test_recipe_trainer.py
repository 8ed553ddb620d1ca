"""The trainer of recipes/sft.py on its own: its counters, its schedule by ratios, and a second part of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from forked_ranks import on_ranks
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from accel_scale.data.default import default_model_path
from accel_scale.settings.trl_config import RecipeSFTConfig

LENGTHS = [3, 17, 5, 9, 11, 4, 7, 13]


def trainer_of(folder: Path, **changes: Any) -> Any:
    from accel_scale.trainers.sft_trainer import ScaleSFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(4, len(tokenizer), (length,), generator=generator).tolist() for length in LENGTHS]
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "bf16": False, "use_cpu": True,
        "report_to": [], "gradient_checkpointing": False, "max_length": 64, "packing": False, "disable_tqdm": True,
    }  # fmt: skip
    return ScaleSFTTrainer(
        model=LlamaForCausalLM(config),
        args=RecipeSFTConfig(**{**settings, **changes.pop("settings", {})}),
        train_dataset=rows,
        processing_class=tokenizer,
        **changes,
    )


def test_it_counts_tokens_without_padding_and_goes_by_ratios(tmp_path: Path) -> None:
    def ranks() -> dict[str, Any]:
        schedule = {"warmup_ratio": 0.5, "min_lr_ratio": 0.1}
        trainer = trainer_of(tmp_path / "run", schedule=schedule, settings={"lr_scheduler_type": "cosine"})
        trainer.take_up_counters({})
        trainer.train()
        history = trainer.state.log_history
        names = ("loss", "learning_rate", "tokens_per_second", "step_seconds", "data_wait_ratio", "host_bytes")
        found = {key: [line[key] for line in history if key in line] for key in names}
        later = trainer_of(tmp_path / "later")
        later.take_up_counters(trainer.counters())
        later.train()
        return {**found, "figures": trainer.figures(), "later": later.figures(), "counters": later.counters()}

    [found] = on_ranks(1, ranks, tmp_path)
    figures = found["figures"]
    tokens = 2 * sum(LENGTHS)  # two steps of two micro-batches of two rows take all rows; four steps do so twice
    assert figures["tokens"] == tokens
    assert figures["steps"] == 4
    assert figures["losses"] == found["loss"]
    assert figures["losses"][-1] < figures["losses"][0]
    assert figures["optimizer"] == "AdamW"
    assert (figures["exact_match"], figures["eval_loss"], figures["ddp"]) == ({}, None, None)
    # The first half of the steps is warm-up, and the cosine ends at a tenth of the peak.
    assert found["learning_rate"] == pytest.approx([5e-3, 1e-2, 1e-2, 5.5e-3])
    # Values drawn in the report go to every tracker, for the steps since the last line; the first step is not timed.
    assert [len(found[name]) for name in ("tokens_per_second", "step_seconds", "data_wait_ratio")] == [3, 3, 3]
    assert min(found["tokens_per_second"]) > 0
    assert len(found["host_bytes"]) == 4
    # A later part of the run continues the counts.
    assert found["later"]["tokens"] == 2 * tokens
    assert found["counters"]["num_tokens"] == 2 * tokens
    assert found["later"]["seconds"] > figures["seconds"]


def test_rows_without_labels_are_refused_in_each_set() -> None:
    from accel_scale.errors import ConfigError
    from accel_scale.trainers.sft_trainer import ScaleDPOTrainer, ScaleSFTTrainer

    good = Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[1, 2, 3]]})
    bad = Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[-100, -100, -100]]})
    for train, evaluation, says in (
        (good, good, None),
        (good, None, None),
        (bad, good, "training"),
        (good, bad, "eval"),
    ):
        trainer: Any = SimpleNamespace(
            train_dataset=train, eval_dataset=evaluation, args=SimpleNamespace(max_length=8)
        )
        if says is None:
            ScaleSFTTrainer.refuse_rows(trainer)
        else:
            with pytest.raises(ConfigError, match=says):
                ScaleSFTTrainer.refuse_rows(trainer)
    for train, evaluation, says in (
        ([1], None, None),
        ([1], [2], None),
        ([], [1], "training"),
        ([1], [], "evaluation"),
    ):
        trainer = SimpleNamespace(train_dataset=train, eval_dataset=evaluation, args=SimpleNamespace(max_length=8))
        if says is None:
            ScaleDPOTrainer.refuse_rows(trainer)
        else:
            with pytest.raises(ConfigError, match=f"no {says} row"):
                ScaleDPOTrainer.refuse_rows(trainer)


def test_figures_of_pairs_have_the_share_that_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_scale.trainers import sft_trainer

    monkeypatch.setattr(sft_trainer.RecipeTrainerMixin, "figures", lambda self: {"losses": [1.0]})
    trainer: Any = sft_trainer.ScaleDPOTrainer.__new__(sft_trainer.ScaleDPOTrainer)
    trainer.state = SimpleNamespace(
        log_history=[{"rewards/accuracies": 0.5}, {"loss": 1.0}, {"rewards/accuracies": 0.75}]
    )
    assert trainer.figures() == {"losses": [1.0], "preferred": [0.5, 0.75]}
