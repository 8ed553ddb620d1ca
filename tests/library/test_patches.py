"""The library in other people's scripts: the patches of docs/library.md applied to ordinary scripts, and effects."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from accel_scale.optimization.schedules import lr_factor

HERE = Path(__file__).parent
SCRIPTS = ("plain_loop", "plain_trainer")
NUM_ROWS, MICRO_BATCH, PEAK = 16, 2, 1e-3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A tiny model and rows of token ids, for both scripts."""
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 96}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(folder / "model")
    row = torch.randint(3, 96, (32,), generator=torch.Generator().manual_seed(1))
    rows = [row.roll(shift).tolist() for shift in range(NUM_ROWS)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder


def patched(name: str, folder: Path) -> Path:
    """`name` with its patch applied, by the ordinary `patch` tool."""
    script = folder / f"{name}.py"
    shutil.copy(HERE / f"{name}.py", script)
    subprocess.run(["patch", "--quiet", script, HERE / f"{name}.patch"], check=True)
    return script


def run(script: Path, inputs: Path, output_dir: Path):
    """Run `main()` of a script in this process; returns its result and the bytes kept for the backward passes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kept_bytes = [0]

    def pack(tensor):
        kept_bytes[0] += tensor.untyped_storage().nbytes()
        return tensor

    output_dir.mkdir()
    words = ["--model", str(inputs / "model"), "--data", str(inputs / "rows.json"), "--output_dir", str(output_dir)]
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return module.main(words), kept_bytes[0]


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory):
    """Each script unpatched and patched, run once in this process."""
    folder = tmp_path_factory.mktemp("runs")
    done = {}
    for name in SCRIPTS:
        done[name, "plain"] = run(HERE / f"{name}.py", inputs, folder / f"{name}-plain")
        done[name, "scaled"] = run(patched(name, folder), inputs, folder / f"{name}-scaled")
    return folder, done


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_patch_changes_five_lines_at_most(name):
    lines = (HERE / f"{name}.patch").read_text().splitlines()
    assert 1 <= sum(re.match(r"[+-](?![+-]{2} )", line) is not None for line in lines) <= 5


def test_docs_show_the_patches():
    text = (HERE.parents[1] / "docs" / "library.md").read_text()
    for name in SCRIPTS:
        changed = [line for line in (HERE / f"{name}.patch").read_text().splitlines()[2:] if line[0] in "+-"]
        assert all(line in text for line in changed), name


def wsd(step: int, num_steps: int) -> float:
    return PEAK * lr_factor(
        step, name="warmup_stable_decay", num_training_steps=num_steps, num_decay_steps=-(-num_steps // 10)
    )


def test_loop_optimizer_schedule_and_memory(runs):
    _, done = runs
    (_, _, plain_optimizer, plain), plain_bytes = done["plain_loop", "plain"]
    (accelerator, model, optimizer, history), scaled_bytes = done["plain_loop", "scaled"]
    assert type(plain_optimizer.optimizer) is torch.optim.AdamW
    assert type(optimizer.optimizer).__name__ == "Adafactor"
    assert [rate for _, rate in history] == pytest.approx([wsd(step, 8) for step in range(8)])
    assert [rate for _, rate in plain] == pytest.approx([PEAK * (1 - step / 8) for step in range(8)])
    assert history[0][0] == pytest.approx(plain[0][0], rel=1e-6)  # nothing has changed before the first update
    assert history[-1][0] < history[0][0]
    assert scaled_bytes < plain_bytes / 2
    assert accelerator.first_verification.num_tensors == len(list(model.parameters()))


def test_loop_saves_atomically(runs):
    folder, _ = runs
    state = folder / "plain_loop-scaled" / "state"
    assert (state / "model.safetensors").is_file()
    assert not (state.parent / ".partial").exists()


def test_trainer_optimizer_schedule_accumulation_and_memory(runs):
    folder, done = runs
    plain, plain_bytes = done["plain_trainer", "plain"]
    scaled, scaled_bytes = done["plain_trainer", "scaled"]
    assert type(plain.optimizer.optimizer).__name__ == "AdamW"
    assert type(scaled.optimizer.optimizer).__module__.startswith("bitsandbytes")
    assert scaled.args.gradient_accumulation_steps == 2
    assert (plain.state.global_step, scaled.state.global_step) == (8, 4)
    rates = [entry["learning_rate"] for entry in scaled.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([wsd(step, 4) for step in range(4)])
    losses = {k: [e["loss"] for e in t.state.log_history if "loss" in e] for k, t in (("p", plain), ("s", scaled))}
    assert losses["s"][-1] < losses["s"][0]
    assert scaled_bytes < plain_bytes / 2
    assert scaled.first_verification.max_abs_diff == 0.0
    assert type(scaled).__name__ == "Trainer"
    loaded = AutoModelForCausalLM.from_pretrained(folder / "plain_trainer-scaled")
    for name, value in scaled.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    kept = {path.name for path in (folder / "plain_trainer-scaled").glob("checkpoint-*")}
    assert kept == {"checkpoint-2", "checkpoint-4"}


def launch(strategy: str, script: Path, inputs: Path, output_dir: Path, *, global_batch_size: int) -> str:
    """Run a script under a launch file of the project, changing only the precision; returns its output."""
    config = HERE.parents[1] / "accelerate_configs" / f"{strategy}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--mixed_precision", "no", "--main_process_port", "0", str(script)]
    words = ["--model", str(inputs / "model"), "--data", str(inputs / "rows.json"), "--output_dir", str(output_dir)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCEL_SCALE_GLOBAL_BATCH_SIZE": str(global_batch_size),
    }
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_patched_loop_gives_the_same_losses_sharded(inputs, tmp_path):
    """Under FSDP2 and ZeRO-3 with two accumulated micro-batches; saved files are read back before they appear."""
    script = patched("plain_loop", tmp_path)
    # Adafactor cannot step sharded tensors and is refused.
    script.write_text(script.read_text().replace("adafactor", "adamw_torch_foreach"))
    losses = {}
    for strategy in ("fsdp2", "zero3"):
        output_dir = tmp_path / strategy
        output_dir.mkdir()
        launch(strategy, script, inputs, output_dir, global_batch_size=8)
        losses[strategy] = [loss for loss, _ in json.loads((output_dir / "history.json").read_text())]
        assert (output_dir / "state" / "scheduler.bin").is_file()
    assert losses["fsdp2"] == pytest.approx(losses["zero3"], rel=1e-5)
    assert losses["fsdp2"][3] < losses["fsdp2"][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_patched_script_on_two_processes_equals_one(name, inputs, runs, tmp_path):
    """A GPU launch file on two CPU processes: the plugin rehearses the launch, and halves the accumulation."""
    _, done = runs
    script = patched(name, tmp_path)
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    assert "rehearsing DDP on 2 CPU processes" in launch("ddp", script, inputs, output_dir, global_batch_size=4)
    if name == "plain_loop":
        history = json.loads((output_dir / "history.json").read_text())
        assert len(history) == NUM_ROWS // (2 * MICRO_BATCH)
        assert [rate for _, rate in history] == pytest.approx([wsd(step, 8) for step in range(4)])
        rows = torch.tensor(json.loads((inputs / "rows.json").read_text())[: 2 * MICRO_BATCH])
        loss = AutoModelForCausalLM.from_pretrained(inputs / "model")(input_ids=rows, labels=rows).loss.item()
        assert history[0][0] == pytest.approx(loss, rel=1e-5)  # the first global batch, across both ranks
        return
    state = json.loads((output_dir / "checkpoint-4" / "trainer_state.json").read_text())
    scaled, _ = done["plain_trainer", "scaled"]
    alone = [entry["loss"] for entry in scaled.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in state["log_history"] if "loss" in entry] == pytest.approx(alone, rel=2e-2)
    assert state["log_history"][0]["loss"] == pytest.approx(alone[0], rel=1e-5)
