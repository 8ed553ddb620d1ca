"""A trainer's output folder, resuming and saving, beyond the case of a run without problems."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_kept_runs import AtStep, _Planted, rehash
from test_saving import SavingTrainer, make_trainer, rows, tiny_llama
from transformers import AutoTokenizer, Trainer, TrainingArguments

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.launching.folder_lock import is_held
from accel_scale.launching.run_folder import read_record
from accel_scale.trainers import checkpoint_trainer as trainers
from accel_scale.trainers import output_mixin
from accel_scale.trainers.output_mixin import OutputFolderMixin
from accel_scale.trainers.saving_mixin import AtomicSavingMixin
from accel_scale.training.checkpoints.contents import what_differs
from accel_scale.training.checkpoints.ranks import Meeting
from accel_scale.training.saving.final_model import save_final

# ── The folder ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Base:
    """The parts of a trainer that the mixin uses."""

    def __init__(self, folder: Path, source: str | None = "") -> None:
        self.args = SimpleNamespace(output_dir=str(folder))
        self.model = SimpleNamespace(config=SimpleNamespace(name_or_path=source))
        self.is_main, self.card = True, "card"

    def train(self, resume: Any = None, *args: Any, **kwargs: Any) -> Any:
        folder = Path(self.args.output_dir)
        return resume, args, kwargs, is_held(folder), (read_record(folder) or {}).get("program")

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        Path(self.args.output_dir, "README.md").write_text(self.card)

    def is_world_process_zero(self) -> bool:
        return self.is_main


class Owner(OutputFolderMixin, Base):  # type: ignore[misc]
    pass


def test_a_run_holds_its_folder_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for argument, program in (("a/mine.py", "mine.py"), ("", "a script")):
        folder = tmp_path / program
        monkeypatch.setattr(sys, "argv", [argument, "other.py"])
        assert Owner(folder).train("auto", 1, two=2) == ("auto", (1,), {"two": 2}, True, program)
        assert not is_held(folder)
    monkeypatch.setattr(output_mixin, "process_index", lambda: 1)
    assert Owner(tmp_path / "other").train() == (None, (), {}, False, None)
    assert not (tmp_path / "other").exists(), "rank 0 holds it for all"


def test_a_model_without_a_name_is_read_from_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source, folder in ((None, "None"), ("", ".")):
        assert Owner(tmp_path / folder, source).train()[3], "no folder of that name is in its way"


def test_a_run_does_not_train_into_its_base_or_into_something_else(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    (folder / "checkpoint-2").mkdir(parents=True)
    with pytest.raises(ConfigError, match="where the model is read from") as refused:
        Owner(folder, str(folder)).train()
    assert refused.value.place == "output_dir"
    (folder / "config.json").write_text("{}")
    for source in (None, "", "org/model"):
        for resume in (None, False, str(tmp_path / "checkpoint-2")):
            with pytest.raises(ConfigError, match="holds a model") as refused:
                Owner(folder, source).train(resume)
            assert refused.value.place == "output_dir"
    assert Owner(folder).train(str(folder / "checkpoint-2"))[3], "its own, that is gone on from"
    (folder / "_run.json").unlink()
    assert Owner(folder).train(True)[3]


def test_a_card_is_written_over_where_this_run_wrote_it(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    owner = Owner(tmp_path)
    owner.train()
    owner.create_model_card()
    owner.card = "newer"
    owner.create_model_card()
    assert card.read_text() == "newer"
    card.write_text("mine")
    owner.create_model_card()
    assert card.read_text() == "mine"
    card.unlink()
    owner.is_main = False  # rank 0 records what was written
    owner.create_model_card()
    owner.card = "newest"
    owner.create_model_card()
    assert card.read_text() == "newer"


# ── Going on ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def dropping() -> Any:
    """A model whose steps depend on random numbers."""
    return tiny_llama(attention_dropout=0.4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("dropping") / "run"
    trainer = make_trainer(folder, model=dropping())
    trainer.train()
    return folder, {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.fixture
def copy(run: Any, tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(run[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    return tmp_path / "run"


def same(trainer: Any, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, expected[name]) for name, tensor in trainer.model.state_dict().items())


def test_random_numbers_go_on(run: Any, copy: Path) -> None:
    trainer = make_trainer(copy, model=dropping())
    trainer.train(resume_from_checkpoint="auto")
    assert same(trainer, run[1])


def test_random_numbers_of_an_ordinary_trainer_go_on(tmp_path: Path) -> None:
    usual = {
        "per_device_train_batch_size": 2, "max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, "use_cpu": True,
        "disable_tqdm": True, "report_to": "none",
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(tmp_path / "run"), **usual)
    plain = Trainer(model=dropping(), args=args, train_dataset=rows())
    plain.train()
    trainer = make_trainer(tmp_path / "other", model=dropping())
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert same(trainer, plain.model.state_dict())


class Counting(SavingTrainer):
    taken_up: Any = None

    def counters(self) -> dict[str, Any]:
        return {"tokens": 7 * self.state.global_step}

    def take_up_counters(self, counters: dict[str, Any]) -> None:
        self.taken_up = counters


def counting(folder: Path, **settings: Any) -> Counting:
    usual = make_trainer(folder, **settings)
    return Counting(model=usual.model, args=usual.args, train_dataset=rows(), eval_dataset=rows(4))


def test_counters_are_kept_and_taken_up(tmp_path: Path) -> None:
    first = counting(tmp_path, max_steps=2)
    first.train()
    assert first.taken_up is None
    first.state.global_step = 0
    again = counting(tmp_path, max_steps=2)
    again.train("auto")
    assert again.taken_up == {"tokens": 14}
    assert again.resumed is not None
    assert again.resumed.folder == tmp_path / "checkpoint-2"


def test_what_is_refused_or_begun_anew_is_said_where_the_user_set_it(copy: Path, capsys: Any) -> None:
    trainer = make_trainer(copy, model=dropping(), learning_rate=0.5)
    with pytest.raises(ConfigError, match=r"learning_rate 0\.01 → 0\.5") as refused:
        trainer.train("auto")
    assert refused.value.place == "resume_from_checkpoint"
    assert "trainer.allow_changed_settings = True" in str(refused.value.fix)
    trainer.resume_words = ("--go_on", "--allow", "…")
    with pytest.raises(ConfigError) as refused:
        trainer.train("auto")
    assert (refused.value.place, "allow it with --allow" in str(refused.value.fix)) == ("--go_on", True)
    capsys.readouterr()
    assert trainer._resume_point(None, copy) is trainer._resume_point(False, copy) is None
    line = f"warning: {copy} holds checkpoint-2 of an earlier run; this one starts over."
    assert capsys.readouterr().out.splitlines() == [line, line]
    assert trainer._resume_point(None, copy / "nowhere") is trainer._resume_point("auto", copy / "nowhere") is None
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="there is no complete checkpoint in") as refused:
        trainer._resume_point(True, copy / "nowhere")
    assert refused.value.place == "--go_on"


def test_a_weight_that_is_missing_in_a_checkpoint_is_refused(copy: Path) -> None:
    folder = copy / "checkpoint-2"
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rehash(folder, read_manifest_of(folder))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is not in the checkpoint"):
        make_trainer(copy, model=dropping()).train("auto")


def read_manifest_of(folder: Path) -> Any:
    """The manifest, read without verifying the folder's files."""
    import json

    from accel_scale.training.checkpoints.manifest import Manifest

    content = json.loads((folder / "manifest.json").read_text())
    content.pop("checksum")
    return Manifest(**content)


def test_a_pickle_in_a_folder_of_another_program_is_not_read(copy: Path, tmp_path: Path) -> None:
    folder, proof = copy / "checkpoint-2", tmp_path / "executed"
    (folder / "manifest.json").unlink()
    torch.save({"state": _Planted(proof)}, folder / "optimizer.pt")
    with pytest.raises(ConfigError, match=r"optimizer\.pt holds .*mkdir"):
        make_trainer(copy, model=dropping()).train(str(folder))
    assert not proof.exists()


def test_states_on_nvme_are_asked_about_before_a_run_goes_on(copy: Path) -> None:
    trainer: Any = make_trainer(copy, model=dropping())
    trainer._meeting, trainer._settings, trainer.is_deepspeed_enabled = Meeting(), {}, True
    config = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
    trainer.accelerator = SimpleNamespace(distributed_type="NO", num_processes=1, state=state)
    with pytest.raises(ConfigError, match="on NVMe") as refused:
        trainer._resume_point("auto", copy)
    assert refused.value.place == "resume_from_checkpoint"


def test_an_adapter_is_one_of_the_settings(tmp_path: Path) -> None:
    def adapter(rank: int) -> Any:
        model = get_peft_model(tiny_llama(), LoraConfig(r=rank, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        return trainers.trainer_settings(make_trainer(tmp_path, model=model))["adapter"]["default"]

    found = adapter(4)
    assert (found["peft_type"], found["r"], found["lora_alpha"], found["target_modules"]) == ("LORA", 4, 8, ["q_proj"])
    assert adapter(2) == {**found, "r": 2}


def test_errors_without_words_are_named() -> None:
    assert what_differs(KeyError()) == "KeyError"
    assert (
        what_differs(RuntimeError("Error(s) in loading:\n\n\tsize mismatch for a.\n\tmore")) == "size mismatch for a"
    )
    assert what_differs(RuntimeError("only this.")) == "only this"
    assert what_differs(RuntimeError("head\n" + "x" * 300)) == "x" * 200


# ── Saving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class FirstIsBest(SavingTrainer):
    """A trainer whose evaluation loss rises at every step."""

    plants: Path | None = None

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"eval_loss": float(self.state.global_step)}
        self.log(dict(metrics))
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if self.plants is not None and self.state.global_step == 2:
            torch.save(_Planted(self.plants), Path(self.args.output_dir, "checkpoint-1", "adapter_model.bin"))
        return metrics


def first_is_best(folder: Path) -> FirstIsBest:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    usual = make_trainer(folder, max_steps=3, save_total_limit=1, **settings)
    return FirstIsBest(model=usual.model, args=usual.args, train_dataset=rows(), eval_dataset=rows(4))


def test_the_best_model_is_loaded_at_the_end_unless_the_run_was_stopped(tmp_path: Path) -> None:
    trainer = first_is_best(tmp_path / "a")
    trainer.train()
    best = load_file(tmp_path / "a" / "checkpoint-1" / "model.safetensors")
    assert torch.equal(trainer.model.model.norm.weight, best["model.norm.weight"])
    assert [path.name for path in (tmp_path / "a").glob("checkpoint*")] == ["checkpoint-1"], "of one the best is kept"
    stopped = first_is_best(tmp_path / "b")
    stopped.add_callback(AtStep(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(SystemExit):
        stopped.train()
    last = load_file(tmp_path / "b" / "checkpoint-2" / "model.safetensors")
    assert torch.equal(stopped.model.model.norm.weight, last["model.norm.weight"])
    assert not torch.equal(last["model.norm.weight"], best["model.norm.weight"])
    planted = first_is_best(tmp_path / "c")
    planted.plants = tmp_path / "executed"
    with pytest.raises(ConfigError, match=r"adapter_model\.bin holds"):
        planted.train()
    assert not (tmp_path / "executed").exists()


class Hub(Trainer):
    """A trainer that records its pushes in a list."""

    def _push_from_checkpoint(self, folder: str) -> None:
        self.pushed = [*getattr(self, "pushed", []), (Path(folder).name, Path(folder, "model.safetensors").is_file())]


class Pushing(AtomicSavingMixin, Hub):
    pass


def test_a_checkpoint_is_pushed_where_it_is_and_only_if_it_is_there(tmp_path: Path, monkeypatch: Any) -> None:
    usual = make_trainer(tmp_path / "run", max_steps=3, save_steps=1)
    trainer = Pushing(model=usual.model, args=usual.args, train_dataset=rows())
    trainer.args.push_to_hub = True
    good = trainer._save_scaler

    def full(folder: str) -> None:
        good(folder)
        if trainer.state.global_step == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "_save_scaler", full)
    trainer.train()
    assert trainer.pushed == [("checkpoint-1", True), ("checkpoint-3", True)]
    said: list[Any] = []
    monkeypatch.setattr(trainer, "push_to_hub", lambda **words: said.append(words))
    trainer.save_model(str(tmp_path / "other"))
    assert said == [{"commit_message": "Model save", "revision": trainer.args.hub_revision}]
    trainer._push_from_checkpoint(str(tmp_path / "run" / "checkpoint-3"))
    assert len(trainer.pushed) == 3, "outside of a save as the trainer's"


def test_a_final_model_goes_where_it_is_asked_to_with_all_that_belongs_to_it(tmp_path: Path, monkeypatch: Any) -> None:
    trainer = make_trainer(tmp_path / "run", max_steps=1, save_strategy="no")
    trainer.processing_class = AutoTokenizer.from_pretrained(default_model_path())
    trainer.train()
    trainer.model.generation_config.update(temperature=0.6)
    trainer.model.config.use_cache = False
    assert trainer.first_verification is None
    trainer.save_model(str(tmp_path / "other"))
    found = trainer.first_verification
    assert (found.source, found.max_abs_diff) == ("model.safetensors", 0.0)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "other")) == len(trainer.processing_class)
    assert not list((tmp_path / "run").glob("*.safetensors"))
    checked: list[Path] = []
    monkeypatch.setattr(
        "accel_scale.training.saving.final_model.verify_checkpoint", lambda base, at: checked.append(at)
    )
    trainer.save_model()
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert (checked, trainer.first_verification) == ([], found), "read back the first time"
    trainer.verify_first_checkpoint, trainer.first_verification = False, None
    trainer.save_model()
    assert checked == []


def test_models_of_other_classes_and_relative_bases_are_saved(tmp_path: Path, monkeypatch: Any) -> None:
    accelerator: Any = SimpleNamespace(unwrap_model=lambda model, keep_torch_compile: model)
    model = torch.nn.Linear(2, 3)
    result = save_final((accelerator, model, None), tmp_path / "linear")
    assert result is not None
    assert result.num_tensors == 2
    assert torch.equal(load_file(tmp_path / "linear" / "model.safetensors")["weight"], model.weight)
    tiny_llama().save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    base = type(tiny_llama()).from_pretrained("base")
    adapter = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    gathered: list[str] = []
    import accel_scale.training.saving.final_model as final_model

    usual = final_model.gather_to_main
    monkeypatch.setattr(
        final_model, "gather_to_main", lambda held, **more: gathered.extend(held) or usual(held, **more)
    )
    save_final((accelerator, adapter, None), tmp_path / "adapter", dtype=torch.bfloat16)
    assert len(gathered) == 2 * 2, "an adapter's save does not gather its base"
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    config = LoraConfig.from_pretrained(str(tmp_path / "adapter"))
    assert config.base_model_name_or_path == str(tmp_path / "base")


def test_a_generation_configuration_that_cannot_be_mended_is_refused(tmp_path: Path) -> None:
    from accel_scale.training.saving.final_model import make_generation_config_savable

    model = tiny_llama()
    make_generation_config_savable(torch.nn.Linear(1, 1))
    make_generation_config_savable(model)
    assert model.generation_config.do_sample is not True, "a good one stays"
    model.generation_config.temperature = 0.5
    make_generation_config_savable(model)
    assert model.generation_config.do_sample is True
    model.generation_config.max_new_tokens = -1
    with pytest.raises(ConfigError, match="the model's generation configuration cannot be saved: ") as refused:
        make_generation_config_savable(model)
    assert (refused.value.place, "\n" in refused.value.problem) == ("generation_config.json", False)
