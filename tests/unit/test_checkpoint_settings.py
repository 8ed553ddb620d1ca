"""Settings that make a resumed run a different run: compared by value, however they were written, and named."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig

from accel_scale.errors import ConfigError
from accel_scale.trainers.checkpoint_trainer import StopCallback, trainer_settings
from accel_scale.training.checkpoints import settings as checkpoint_settings
from accel_scale.training.checkpoints.settings import (
    MEANING,
    differences,
    files_fingerprint,
    meaning_of,
    model_record,
    refuse_changes,
    rows_fingerprint,
    schedule_length,
    with_defaults,
)


class Kind(Enum):
    COSINE = "cosine"


def kept(record: Any) -> Any:
    """`record` as it comes back from a checkpoint."""
    return json.loads(json.dumps(record))


def test_what_changes_learning_is_kept_and_the_rest_is_not() -> None:
    flags = {
        "learning_rate": 1e-4, "lr_scheduler_type": Kind.COSINE, "seed": 0, "columns": ("a", "b"),
        "logging_steps": 5, "output_dir": "x", "per_device_train_batch_size": 8, "optim_args": None,
    }  # fmt: skip
    found = meaning_of(flags, SimpleNamespace(seed=9, weight_decay=0.1, save_steps=3), model={"type": "llama"})
    assert found == {
        "learning_rate": 1e-4, "lr_scheduler_type": "cosine", "seed": 0, "columns": ["a", "b"], "optim_args": None,
        "weight_decay": 0.1, "model": {"type": "llama"},
    }  # fmt: skip
    assert kept(found) == found
    assert len(set(MEANING)) == len(MEANING)


# TRL flags that its SFTConfig lacks: how answers are generated and shown, and what depends on the ranks.
NOT_LEARNT = re.compile(
    r"(vllm_|log_|use_transformers|transformers_|ds3_).*|use_vllm|cache_implementation|num_completions_to_print|"
    r"num_generations_eval|generation_batch_size|steps_per_generation|max_tool_calling_iterations|"
    r"cast_lm_head_to_fp32|precompute_ref_(log_probs|batch_size)"
)


def test_every_flag_of_a_loss_is_compared() -> None:
    from accel_scale.flags.library import SHIPPED

    classes = json.loads(SHIPPED.read_text(encoding="utf-8"))["classes"]
    flags = {name: {flag["dest"] for flag in found["flags"]} for name, found in classes.items()}
    for name in ("DPO", "KTO", "GRPO", "RLOO", "Reward"):
        own = flags[f"trl:{name}Config"] - flags["trl:SFTConfig"]
        assert {flag for flag in own - set(MEANING) if not NOT_LEARNT.fullmatch(flag)} == set(), name
    assert {"rewards", "router_aux_loss_coef", "truncation_mode"} <= set(MEANING)


def test_adapters_settings_mean_nothing_without_adapters() -> None:
    flags = {"lora_r": 8, "lora_alpha": 16, "use_rslora": True, "use_dora": False, "learning_rate": 1e-4}
    assert meaning_of(flags, method="full") == {"learning_rate": 1e-4, "method": "full"}
    assert meaning_of(flags, method="lora") == {**flags, "method": "lora"}
    assert "length" not in meaning_of(flags, length=None)
    assert meaning_of(flags, length="5 steps")["length"] == "5 steps"


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ({"learning_rate": 2e-4}, {"learning_rate": 1e-4}, ["learning_rate 0.0002 → 0.0001"]),
        ({"columns": ["a", "b"]}, {"columns": []}, ["columns a,b → none"]),
        ({"columns": ["a"]}, {"columns": ("a",)}, []),
        ({"model": {"type": "llama", "n": 1}}, {"model": {"type": "llama", "n": 2}}, ["model.n 1 → 2"]),
        ({"optim_args": None}, {"optim_args": "x"}, ["optim_args none → x"]),
        ({"lora_r": 8}, {"seed": 1}, []),  # keys that only one record has come from another version and do not count
        ({"seed": 1, "lora_r": 8}, {"lora_r": 4, "seed": 2}, ["seed 1 → 2", "lora_r 8 → 4"]),
        ({"packing": True}, {"packing": False}, ["packing True → False"]),
    ],
)
def test_differences_are_named_with_both_values(before, now, says) -> None:
    assert differences(before, now) == says


def test_a_changed_run_is_refused_and_an_unchanged_one_is_not() -> None:
    folder = Path("runs/a/checkpoint_5")
    refuse_changes(folder, {"seed": 1}, {"seed": 1}, place="--resume")
    with pytest.raises(ConfigError) as caught:
        refuse_changes(folder, {"seed": 1, "max_length": 64}, {"seed": 2, "max_length": 32}, place="--resume")
    error = caught.value
    assert error.place == "--resume"
    assert "runs/a/checkpoint_5 was saved with other settings: seed 1 → 2, max_length 64 → 32." in str(error)
    assert "--allow_changed_settings" in error.fix
    assert "--global_batch_size" not in error.fix
    with pytest.raises(ConfigError) as caught:
        refuse_changes(folder, {"global_batch_size": 32}, {"global_batch_size": 16}, place="--resume", allow="--so")
    assert "allow it with --so; --global_batch_size 32 keeps the batch on these ranks" in caught.value.fix


@pytest.mark.parametrize(
    ("schedule", "steps", "epochs", "expected"),
    [
        ("cosine", 100, 3.0, "100 steps"),
        ("cosine", -1, 3.0, "3 epochs"),
        ("linear", 0, 0.5, "0.5 epochs"),
        ("constant", 100, 3.0, None),
        ("constant_with_warmup", -1, 3.0, None),
    ],
)
def test_how_long_a_schedule_is(schedule, steps, epochs, expected) -> None:
    assert schedule_length(schedule, steps, epochs) == expected
    assert schedule_length(schedule, steps, epochs, limited_by_time=True) is None


def test_a_model_is_its_numbers_and_the_weights_it_began_from(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
    record = model_record(config, None)
    assert record["type"] == "llama"
    assert (record["hidden_size"], record["num_hidden_layers"], record["vocabulary"]) == (64, 2, 96)
    assert "weights" not in record
    assert model_record(config, "meta-llama/Llama-3.2-1B")["weights"] == "meta-llama/Llama-3.2-1B"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"1" * 100)
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "README.md").write_text(name)
    one, other = (model_record(config, str(tmp_path / name))["weights"] for name in ("a", "b"))
    assert one == other, "the same files in another place are the same model"
    (tmp_path / "b" / "model.safetensors").write_bytes(b"1" * 99 + b"2")
    assert model_record(config, str(tmp_path / "b"))["weights"] != one
    assert differences(kept(record), model_record(LlamaConfig(**{**config.to_dict(), "hidden_size": 32}), None)) == [
        "hidden_size 64 → 32"
    ]


def test_what_was_written_before_stays_the_same_run(tmp_path: Path) -> None:
    """A fingerprint of other bytes, or of another length, would refuse to resume from every existing checkpoint."""
    (tmp_path / "a.txt").write_text("abc")
    assert files_fingerprint([tmp_path / "a.txt"]) == "5349139033ae44d1"
    parts = SimpleNamespace(hidden_size=5, num_hidden_layers=3, vocab_size=7, n_head="many")
    of_images: Any = SimpleNamespace(get_text_config=lambda: parts, model_type="vl", hidden_size=9)
    assert model_record(of_images, None) == {
        "type": "vl", "hidden_size": 5, "num_hidden_layers": 3, "vocabulary": 7
    }  # fmt: skip
    assert model_record(parts, None)["type"] == "SimpleNamespace"


def test_files_are_told_apart_by_name_size_beginning_and_end(tmp_path: Path) -> None:
    large = bytes(200_000)
    changes = {
        "first": b"1" + large[1:],
        "last": large[:-1] + b"1",
        "size": large + b"0",
    }
    path = tmp_path / "w.bin"
    path.write_bytes(large)
    seen = {files_fingerprint([path])}
    for content in changes.values():
        path.write_bytes(content)
        seen.add(files_fingerprint([path]))
    assert len(seen) == 4
    path.write_bytes(large)
    other = tmp_path / "v.bin"
    other.write_bytes(large)
    assert files_fingerprint([other]) not in seen
    assert files_fingerprint([path, other]) == files_fingerprint([other, path])


def test_rows_are_told_apart_by_content_and_order() -> None:
    rows = [{"text": f"row {index}"} for index in range(2500)]  # more than one batch

    def stamp(changed: list[dict[str, str]]) -> str:
        return rows_fingerprint(Dataset.from_list(changed))

    assert stamp(rows) == stamp(list(rows))
    assert stamp(rows).startswith("2500 rows ")
    for place in (0, 999, 1000, 2499):
        changed = [*rows[:place], {"text": "another"}, *rows[place + 1 :]]
        assert stamp(changed) != stamp(rows), place
    assert stamp(rows[::-1]) != stamp(rows)
    assert stamp(rows[:-1]) != stamp(rows)


def test_rows_of_other_kinds() -> None:
    rows = [{"a": torch.tensor([index, 2]), "b": (index, [1.5])} for index in range(700)]
    assert rows_fingerprint(rows) == rows_fingerprint([dict(reversed(row.items())) for row in rows])
    assert rows_fingerprint(rows) != rows_fingerprint([{"a": torch.tensor([7, 2]), "b": (7, [1.5])}, *rows[1:]])
    assert rows_fingerprint(rows) != rows_fingerprint(rows[:-1])
    stream = Dataset.from_list([{"text": str(index)} for index in range(20)])
    assert rows_fingerprint(stream.to_iterable_dataset()) == rows_fingerprint(stream.to_iterable_dataset())
    shorter = stream.select(range(1, 20)).to_iterable_dataset()
    assert rows_fingerprint(stream.to_iterable_dataset()) != rows_fingerprint(shorter)
    assert rows_fingerprint(iter([1])) == "rows that cannot be read twice"


def test_large_data_is_sampled_from_its_first_row_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third of 1000 rows is read: every fourth would be fewer than 256, and more are read rather than fewer."""
    monkeypatch.setattr(checkpoint_settings, "_HASHED_BYTES", 100)
    rows = [{"text": f"row {index}"} for index in range(1000)]

    def stamp(place: int | None = None) -> str:
        changed = [{"text": "another"} if index == place else row for index, row in enumerate(rows)]
        return rows_fingerprint(Dataset.from_list(changed))

    same = stamp()
    assert same.startswith("1000 rows ")
    assert len(same.split()[-1]) == 16, "a line names two of them"
    assert [stamp(place) == same for place in (0, 1, 2, 3, 500, 501, 999)] == [
        False, True, True, False, True, False, False,
    ]  # fmt: skip
    few = [{"a": 1}, {"a": 2}]
    assert rows_fingerprint(few) != rows_fingerprint([{"a": 1}, {"a": 3}])
    stream = Dataset.from_list([{"a": index} for index in range(10)])
    first = rows_fingerprint(stream.to_iterable_dataset())
    later = stream.map(lambda row: {"a": 99} if row["a"] == 8 else row)
    assert rows_fingerprint(later.to_iterable_dataset()) == first, "eight rows of a stream are read"
    earlier = stream.map(lambda row: {"a": 99} if row["a"] == 7 else row)
    assert rows_fingerprint(earlier.to_iterable_dataset()) != first


def test_defaults_of_flags_count_as_settings() -> None:
    @dataclass
    class Flags:
        needed: int
        seed: int = 3
        columns: list[str] = field(default_factory=lambda: ["a"])

    assert with_defaults({"seed": 4}, [Flags]) == {"needed": None, "seed": 4, "columns": ["a"]}


def test_values_are_compared_and_shown_as_json_gives_them_back() -> None:
    now = {"columns": {"b", "a"}, "optim_args": {1: Path("x")}, "seed": None, "lr_scheduler_type": Kind.COSINE}
    found = meaning_of(now)
    assert found == {
        "columns": ["a", "b"], "optim_args": {"1": "x"}, "seed": None, "lr_scheduler_type": "cosine"
    }  # fmt: skip
    assert differences(kept(found), found) == []
    assert differences({"columns": ["a"], "seed": 1}, {"columns": [], "seed": None}) == [
        "columns a → none", "seed 1 → none"
    ]  # fmt: skip
    one = {"global_batch_size": 8, "seed": 1}
    with pytest.raises(ConfigError) as caught:
        refuse_changes(Path("x"), one, {"global_batch_size": 4, "seed": 2}, place="--resume")
    assert "keeps the batch" not in caught.value.fix, "more than the number of ranks has changed"


# ── Of trainers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_signal_on_any_rank_saves_and_stops_all_without_an_evaluation() -> None:
    from transformers import TrainerControl

    heard = [0, 15, 0]  # the largest signal on any rank, step by step
    meeting: Any = SimpleNamespace(largest=lambda received: heard.pop(0))
    signals: Any = SimpleNamespace(received=0)
    callback = StopCallback(meeting, signals)
    quiet = TrainerControl(should_evaluate=True)
    callback.on_step_end(None, None, quiet)
    assert (quiet.should_save, quiet.should_training_stop, quiet.should_evaluate) == (False, False, True)
    asked = TrainerControl(should_evaluate=True)
    callback.on_step_end(None, None, asked)
    assert (asked.should_save, asked.should_training_stop, asked.should_evaluate) == (True, True, False)
    assert callback.number == 15
    callback.on_step_end(None, None, TrainerControl())
    assert heard == [0], "once is enough"


def test_the_meaning_of_a_trainers_run() -> None:
    def of(**changes: Any) -> dict[str, Any]:
        usual = {
            "world_size": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "optim": "adamw",
            "lr_scheduler_type": Kind.COSINE, "max_steps": 30, "num_train_epochs": 3.0, "seed": 1,
        }  # fmt: skip
        sp_size = changes.pop("sp_size", 1)
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(**{**usual, **changes}),
            model=SimpleNamespace(config=LlamaConfig(hidden_size=64)),
            sp_size=sp_size,
            accelerator=SimpleNamespace(mixed_precision="bf16"),
            train_dataset=[{"a": 1}],
        )
        return trainer_settings(trainer)

    found = of()
    assert found["global_batch_size"] == 2 * 8 * 4
    assert (found["length"], found["precision"], found["adapter"]) == ("30 steps", "bf16", "none")
    assert (found["optim"], found["lr_scheduler_type"], found["seed"]) == ("adamw", "cosine", 1)
    assert found["model"]["hidden_size"] == 64
    assert of(sp_size=2)["global_batch_size"] == 2 * 8 * 2, "ranks that share rows count once"
    # The same global batch on other ranks is the same run.
    assert of(world_size=2, gradient_accumulation_steps=16) == found
    assert differences(kept(found), of(max_steps=-1)) == ["length 30 steps → 3 epochs"]
    replaced = of(optimizer_name="ours", schedule_name="wsd")
    assert (replaced["optim"], replaced["lr_scheduler_type"]) == ("ours", "wsd")
