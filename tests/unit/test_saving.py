"""Atomic saving, recovery after a kill, and verification of what was saved against what is in memory."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from accel_scale.errors import ConfigError
from accel_scale.plugin.plugin import ScalePlugin
from accel_scale.trainers.saving_mixin import AtomicSavingMixin
from accel_scale.training.checkpoints import atomic
from accel_scale.training.checkpoints.atomic import checkpoint_problems
from accel_scale.training.checkpoints.folders import latest_complete_checkpoint
from accel_scale.training.checkpoints.staging import prepare_output_dir, save_atomically
from accel_scale.training.saving.final_model import save_final
from accel_scale.training.saving.verification import CheckpointMismatch, _ties, verify_checkpoint


def tiny_llama(seed: int = 0, **overrides) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": True, **overrides}))


def rows(count: int = 16) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (count, 12), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


class SavingTrainer(AtomicSavingMixin, Trainer):
    pass


def make_trainer(output_dir: Path, model=None, **overrides) -> SavingTrainer:
    settings = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }
    args = TrainingArguments(output_dir=str(output_dir), **{**settings, **overrides})
    return SavingTrainer(model=model or tiny_llama(), args=args, train_dataset=rows(), eval_dataset=rows(4))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of four steps: its trainer and its folder."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(
        folder, save_steps=1, save_total_limit=2, eval_strategy="steps", load_best_model_at_end=True
    )
    trainer.train()
    trainer.save_model()
    return trainer, folder


def test_checkpoints_rotate_and_the_best_one_is_where_the_state_says(finished):
    trainer, folder = finished
    kept = sorted(path.name for path in folder.iterdir() if path.is_dir())
    best = Path(trainer.state.best_model_checkpoint)
    assert kept == sorted({"checkpoint-4", best.name})
    assert best.parent == folder
    assert best.is_dir()
    state = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]).is_dir()
    assert not (folder / atomic.STAGING_FOLDER).exists()


def test_first_checkpoint_was_read_back(finished):
    trainer, _ = finished
    result = trainer.first_verification
    assert result.num_tensors == len(list(trainer.model.parameters()))  # the tied embedding is one tensor
    assert result.max_abs_diff == 0.0
    assert result.source == "model.safetensors"


def test_final_folder_loads_with_plain_from_pretrained(finished):
    trainer, folder = finished
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_what_training_needs_does_not_end_up_in_the_model(tmp_path):
    """The cache is off during training, and this generation configuration can be loaded but not saved as it is."""
    model = tiny_llama()
    model.config.use_cache = False
    model.generation_config.update(temperature=0.6, top_p=0.9)
    with pytest.raises(ValueError, match="do_sample"):
        model.generation_config.validate(strict=True)
    trainer = make_trainer(tmp_path, model=model, max_steps=2)
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.config.use_cache is True
        assert loaded.generation_config.temperature == 0.6
        assert loaded.generation_config.do_sample is True


def test_a_full_disk_leaves_no_unfinished_checkpoint(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)

    def full(output_dir):
        Path(output_dir, "optimizer.pt").write_bytes(b"x" * 1000)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert not list(tmp_path.rglob("optimizer.pt"))
    assert latest_complete_checkpoint(tmp_path) is None


def test_final_folder_in_another_dtype(finished, tmp_path):
    trainer, _ = finished
    save_final(trainer, tmp_path / "half", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, trainer.model.lm_head.weight.bfloat16())
    assert "lm_head.weight" not in load_file(tmp_path / "half" / "model.safetensors")  # tied: stored once


@pytest.mark.slow
@pytest.mark.parametrize("how", [True, "auto"])
def test_resume_takes_the_newest_complete_checkpoint(tmp_path, how):
    reference = make_trainer(tmp_path / "straight", max_steps=6)
    reference.train(resume_from_checkpoint="auto")  # no checkpoint exists: a fresh start
    make_trainer(tmp_path / "run", max_steps=6, save_steps=2).train()
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoint-6")
    weights = run / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])  # as after a full disk
    (run / atomic.STAGING_FOLDER / "checkpoint-6").mkdir(parents=True)
    assert latest_complete_checkpoint(run) == str(run / "checkpoint-2")
    resumed = make_trainer(run, max_steps=6)
    resumed.train(resume_from_checkpoint=how)
    assert resumed.state.log_history[0]["step"] == 1  # kept from the checkpoint at step 2
    for name, value in reference.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=0, atol=0)
    assert not (run / atomic.STAGING_FOLDER).exists()


def test_resume_true_without_a_complete_checkpoint_is_refused(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_rewriting_an_existing_checkpoint_replaces_it(tmp_path):
    make_trainer(tmp_path).train()
    before = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    make_trainer(tmp_path, model=tiny_llama(seed=5)).train()
    after = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    assert not checkpoint_problems(tmp_path / "checkpoint-4")


class _Stop(BaseException):
    """Stands in for the kill: nothing catches it, and no cleanup may run after it."""


def _kill_at(monkeypatch, calls: list[str], at: int):
    """Let the first `at` changes to the filesystem happen, then stop."""

    def wrap(function, label):
        def stopping(*args, **kwargs):
            if len(calls) == at:
                raise _Stop
            calls.append(label)
            return function(*args, **kwargs)

        return stopping

    monkeypatch.setattr(os, "rename", wrap(os.rename, "rename"))
    monkeypatch.setattr(os, "replace", wrap(os.replace, "replace"))
    monkeypatch.setattr(Path, "unlink", wrap(Path.unlink, "unlink"))
    monkeypatch.setattr(shutil, "rmtree", wrap(shutil.rmtree, "rmtree"))


def _write_generation(folder: Path, generation: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shards = ["a", "b"] if generation == 1 else ["b", "c"]
    for shard in shards:
        save_file({shard: torch.full((4,), float(generation))}, folder / f"model-{shard}.safetensors")
    weight_map = {shard: f"model-{shard}.safetensors" for shard in shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"generation": generation}))


def _read_generation(folder: Path) -> set[float] | None:
    """The values of all tensors that a loader would read, or None if a loader refuses the folder."""
    if not (folder / "config.json").is_file():
        return None
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    configured = json.loads((folder / "config.json").read_text())["generation"]
    return {configured} | {load_file(folder / file)[name][0].item() for name, file in weight_map.items()}


@pytest.mark.parametrize("name", ["checkpoint-7", "final"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_folder_or_none(tmp_path, monkeypatch, name):
    """Publish a folder over an older one, stopping at every change to the filesystem in turn."""
    for stop in range(100):
        run = tmp_path / f"stop-{stop}"
        target = run / name
        _write_generation(target, 1)
        staged = run / atomic.STAGING_FOLDER / name if name != "final" else target / atomic.STAGING_FOLDER / name
        _write_generation(staged, 2)
        move = atomic.publish if name != "final" else atomic.publish_into
        calls: list[str] = []
        with monkeypatch.context() as patch:
            _kill_at(patch, calls, stop)
            try:
                move(staged, target)
                finished = True
            except _Stop:
                finished = False
        assert _read_generation(target) in (None, {1.0}, {2.0}), (stop, calls)
        atomic.recover(run if name != "final" else target)
        assert _read_generation(target) in (None, {1.0}, {2.0}), (stop, calls)
        if name != "final":  # a checkpoint is never lost
            assert _read_generation(target) is not None, (stop, calls)
        assert not list(run.rglob(atomic.STAGING_FOLDER)), (stop, calls)
        if finished:
            assert _read_generation(target) == {2.0}
            assert len(calls) == stop >= 2
            return
    pytest.fail("never finished")


def test_an_error_while_saving_leaves_nothing(tmp_path):
    def save():
        with save_atomically(tmp_path / "out" / "checkpoint-1") as staging:
            (staging / "model.safetensors").write_bytes(b"x")
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        save()
    assert list((tmp_path / "out").iterdir()) == []


def test_leftovers_beside_a_final_folder_are_removed_and_other_runs_left_alone(tmp_path):
    for name in ("mine", "theirs"):
        (tmp_path / atomic.STAGING_FOLDER / name).mkdir(parents=True)
    assert prepare_output_dir(tmp_path / "mine") == ["removed unfinished mine"]
    assert [path.name for path in (tmp_path / atomic.STAGING_FOLDER).iterdir()] == ["theirs"]


@pytest.mark.parametrize("how", ["project_dir", "save_state", "load_state", "a trainer"])
def test_a_killed_save_state_is_cleared_away_at_the_next_start_and_nothing_else(tmp_path, how):
    run, model = tmp_path / "run", tiny_llama()
    saved = run / "step_1"
    child = os.fork()
    if child == 0:
        accelerator = ScalePlugin(verify_first_checkpoint=False).accelerator(cpu=True)
        accelerator.prepare(model)
        accelerator.save_state(str(saved))
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: os.kill(os.getpid(), signal.SIGKILL))
        accelerator.save_state(str(run / "step_2"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = run / atomic.STAGING_FOLDER
    assert [path.name for path in left.iterdir()] == ["step_2"]
    # Other folders: some with similar names, and one that another run is saving next to this one.
    others = [run / "step_2.partial", run / "notes.partial", tmp_path / atomic.STAGING_FOLDER / "other_run"]
    for folder in others:
        folder.mkdir(parents=True)
        (folder / "file").write_text("mine")
    if how == "a trainer":
        make_trainer(run, max_steps=1).train()
    else:
        project = {"project_dir": str(run)} if how == "project_dir" else {}
        accelerator = ScalePlugin(verify_first_checkpoint=False).accelerator(cpu=True, **project)
        accelerator.prepare(model)
        if how == "save_state":
            accelerator.save_state(str(run / "step_3"))
        elif how == "load_state":
            accelerator.load_state(str(saved))
    assert not left.exists()
    assert (saved / "model.safetensors").is_file()
    assert [(folder / "file").read_text() for folder in others] == ["mine"] * 3


_KILLED_RUN = """
import os, sys, torch
sys.path.insert(0, {tests!r})
import test_saving as t
model = t.tiny_llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
trainer = t.make_trainer({folder!r}, model=model, max_steps=400, save_steps=1)
print("started", flush=True)
trainer.train(resume_from_checkpoint=t.latest_complete_checkpoint({folder!r}))
"""


@pytest.mark.slow
def test_kill_9_in_the_middle_of_saving_leaves_no_torn_checkpoint(tmp_path):
    """Kill and resume a run that saves at every step, twice or until a kill has hit while a staged folder existed."""
    source = textwrap.dedent(_KILLED_RUN).format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    staging, kills, newest = tmp_path / atomic.STAGING_FOLDER, 0, 0
    for turn, after_bytes in enumerate((0, 10_000_000, 0, 10_000_000, 0)):
        if turn >= 2 and kills:
            break  # on a busy machine the save may finish before the signal arrives
        run = subprocess.Popen(
            [sys.executable, "-c", source], stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                assert run.poll() is None, "the run ended before it was killed"
                staged = []
                with contextlib.suppress(FileNotFoundError):  # removed during listing
                    staged = [p for p in staging.glob("checkpoint-*") if int(p.name.split("-")[1]) > newest + 1]
                if staged and _size(staged[0]) > after_bytes:
                    break
                time.sleep(0.0005)
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
        kills += any(staging.glob("checkpoint-*"))
        checkpoint = latest_complete_checkpoint(tmp_path)
        assert checkpoint is not None
        step = int(checkpoint.rsplit("-", 1)[1])
        assert step > newest
        newest = step
        for folder in tmp_path.glob("checkpoint-*"):
            assert not checkpoint_problems(folder), folder
        assert json.loads(Path(checkpoint, "trainer_state.json").read_text())["global_step"] == step
        AutoModelForCausalLM.from_pretrained(checkpoint)
    assert kills >= 1, "the kills did not fall into a save"


def _size(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*"))
    except FileNotFoundError:  # published in the meantime
        return -1


@pytest.fixture
def saved(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_verification_reads_sharded_files(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert verify_checkpoint(model, tmp_path).num_tensors == len(list(model.parameters()))


def test_verification_reads_what_fsdp_gathers_into_one_file(tmp_path):
    model = tiny_llama()
    torch.save(model.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    found = verify_checkpoint(model, tmp_path)
    assert (found.num_tensors, found.source) == (len(model.state_dict()), "pytorch_model_fsdp.bin")
    with torch.no_grad():
        model.model.norm.weight[3] += 1
    with pytest.raises(CheckpointMismatch, match=r"model\.norm\.weight differs by up to 1"):
        verify_checkpoint(model, tmp_path)


def test_verification_sees_one_flipped_bit(saved):
    model, folder = saved
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x40
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointMismatch, match="differs by up to"):
        verify_checkpoint(model, folder)


def _rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update({"model.norm.weight": torch.empty(0)}), r"has shape \[0\] instead of \[32\]"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:16].clone()}), r"shape \[16\] instead"),
        (lambda t: t.update({"stray": torch.ones(1)}), "stray is unexpected"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "differs by up to inf"),
    ],
)
def test_verification_names_the_tensor(saved, change, message):
    model, folder = saved
    _rewrite(folder, change)
    with pytest.raises(CheckpointMismatch, match=message):
        verify_checkpoint(model, folder)


def test_verification_of_a_file_cut_off(saved):
    model, folder = saved
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointMismatch, match="cannot be read"):
        verify_checkpoint(model, folder)
    assert "instead of" in checkpoint_problems(folder)[0]


def test_verification_of_weights_rounded_to_the_files_dtype(saved):
    model, folder = saved
    model.to(torch.bfloat16).save_pretrained(folder)
    assert verify_checkpoint(model.float(), folder).max_abs_diff == 0.0


def lora(model, **settings):
    return get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], **settings)
    )


def test_adapter_is_verified_and_loads_through_its_base(tmp_path, monkeypatch):
    tiny_llama().save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    base = AutoModelForCausalLM.from_pretrained("base")  # a relative path, as users type it
    model = lora(base, use_dora=True, modules_to_save=["lm_head"])
    for parameter in model.parameters():
        parameter.data.add_(0.01 * torch.randn_like(parameter)) if parameter.requires_grad else None
    trainer = make_trainer(tmp_path / "run", model=model, max_steps=2)
    trainer.train()
    trainer.save_model()
    assert trainer.first_verification.source == "adapter_model.safetensors"
    assert trainer.first_verification.num_tensors == 2 * 2 * 3 + 1  # A, B and magnitude per matrix; the head
    monkeypatch.chdir(tmp_path.parent)
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = trainer.model.eval()(ids).logits
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
        loaded = AutoPeftModelForCausalLM.from_pretrained(folder).eval()
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_an_empty_adapter_is_caught(tmp_path):
    """ZeRO-3 with LoRA once wrote such an adapter: names with empty tensors."""
    model = lora(tiny_llama())
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    save_file({name: torch.empty(0) for name in load_file(path)}, path)
    with pytest.raises(CheckpointMismatch, match=r"lora_A.weight has shape \[0\] instead of \[4, 32\]"):
        verify_checkpoint(model, tmp_path)


def test_a_trained_weight_that_the_adapter_leaves_out_is_caught(tmp_path):
    model = lora(tiny_llama())
    model.get_input_embeddings().weight.requires_grad_(True)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"embed_tokens.weight is trained but not part of what is saved"):
        verify_checkpoint(model, tmp_path)


def test_names_that_share_a_tensor_and_how_far_two_are_apart():
    from accel_scale.training.saving.tensor_difference import difference, tied_names

    shared, other = torch.ones(2), torch.ones(2)
    model = torch.nn.Module()
    model.all_tied_weights_keys = {"head": "embedding", "absent": "embedding"}
    apart = {"head": shared, "embedding": shared.clone(), "other": other}  # as ranks that share a model gather them
    assert _ties(model, apart) == {name: ["embedding", "head"] for name in ("head", "embedding")}
    assert tied_names({"a": shared, "b": other, "c": shared}) == {"a": ["a", "c"], "c": ["a", "c"]}
    assert difference("a", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])) == ("a differs by up to 0.5", 0.5)
    assert difference("a", torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan])) == (None, 0.0)
    assert difference("a", torch.tensor([math.nan]), torch.tensor([1.0]))[1] == math.inf
    assert difference("a", torch.tensor([math.inf]), torch.tensor([math.inf])) == (None, 0.0)
    assert difference("a", torch.tensor([1, 2]), torch.tensor([1, 3])) == ("a differs", math.inf)
    assert difference("a", torch.tensor([1, 2]), torch.tensor([1, 2])) == (None, 0.0)
    assert difference("a", torch.ones(3), torch.ones(2))[0] == "a has shape [2] instead of [3]"
    assert difference("a", torch.ones(0), torch.ones(0))[0] == "a is empty"


def test_mismatch_stops_the_run_and_is_not_published(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    honest = trainer._save

    def losing_a_tensor(output_dir=None, state_dict=None):
        honest(output_dir, state_dict)
        _rewrite(Path(output_dir), lambda tensors: tensors.pop("model.norm.weight"))

    monkeypatch.setattr(trainer, "_save", losing_a_tensor)
    with pytest.raises(CheckpointMismatch, match=r"model.norm.weight is missing"):
        trainer.train()
    assert latest_complete_checkpoint(tmp_path) is None
    trainer.verify_first_checkpoint = False
    trainer.train()
    assert latest_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_the_trainers_methods_that_are_overridden_still_exist():
    """The overridden methods are named in one place; this fails when transformers moves them."""
    import inspect

    source = inspect.getsource(Trainer._save_checkpoint)
    for call in ("self._get_output_dir(trial=trial)", "self._push_from_checkpoint(output_dir)", "rotate_checkpoints("):
        assert call in source
    assert "_internal_call=True" in source


def test_a_best_checkpoint_says_where_it_is_and_not_where_it_was_written(tmp_path):
    """With a rate of zero the first checkpoint stays the best; a resume reads each state that names it."""
    trainer = make_trainer(
        tmp_path, learning_rate=0.0, max_steps=2, save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    for step in (1, 2):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-1")
