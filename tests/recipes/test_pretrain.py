"""The pretraining recipe on a small model: it learns, resumes bit for bit, branches, and avoids bad data."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from accel_scale.errors import ConfigError
from accel_scale.facts.exit_statuses import EXIT_STOPPED, OUT_OF_MEMORY_STATUS
from accel_scale.training.guard.events import read_events

pytestmark = pytest.mark.slow

WORDS = ["one", "two", "river", "stone", "walks", "sings", "and", "the", "blue", "runs", "over"]
SHAPE = {
    "vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
POISON = "\x01"
COMPARED = ("step", "loss", "grad_norm", "learning_rate", "tokens", "rows", "eval_loss")
COMMON = (
    "--max_length 64 --per_device_train_batch_size 4 --global_batch_size 8 --logging_steps 1 --log_rows true "
    "--precision fp32 --sample_tokens 0 --dataloader_num_workers 0 --eval_rows 16 --learning_rate 3e-3"
)


def sentence(generator: random.Random, num_words: int) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(num_words))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of 2,000 documents, the same text with some of them poisoned, and a model's shape."""
    folder, generator = tmp_path_factory.mktemp("pretrain"), random.Random(0)
    clean = [sentence(generator, generator.randint(3, 60)) for _ in range(2000)]
    poisoned = list(clean)
    # Many short documents fill a row, so a few poisoned ones among 2,000 reach only some batches.
    for index in range(100, 1900, 450):
        poisoned[index] = poisoned[index][:20] + POISON
    noise = random.Random(1)
    for index in range(300, 1900, 450):
        poisoned[index] = "".join(chr(noise.randint(33, 126)) for _ in range(250))
    for name, texts in (("clean", clean), ("poisoned", poisoned)):
        rows = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    heldout = [json.dumps({"text": sentence(generator, 40)}) for _ in range(60)]
    (folder / "heldout.jsonl").write_text("\n".join(heldout) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    return folder


Pretrain = Callable[..., dict[str, Any]]


def memory_by_kind(path: Path) -> dict[str, int]:
    """Bytes per kind in a memory summary."""
    found = (re.match(r"(.*?)  .* ([\d,]+) B$", line) for line in path.read_text().splitlines())
    return {match[1].strip(): int(match[2].replace(",", "")) for match in found if match}


@pytest.fixture
def pretrain(pretrain_module: Any, inputs: Path, tmp_path: Path) -> Pretrain:
    """``pretrain("--max_steps 5", out=…)``: runs the recipe in this process and returns its summary."""

    def run(flags: str, *, out: str = "out", data: str = "clean", model: str | None = None) -> dict[str, Any]:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        weights = f"--model_name_or_path {model}" if model else f"--model_config {inputs}/config.json --tokenizer byte"
        line = f"{weights} --data {inputs}/{data}.jsonl --validation_data {inputs}/heldout.jsonl {COMMON} {flags}"
        return {**pretrain_module.main([*line.split(), "--output_dir", str(tmp_path / out)]), "out": tmp_path / out}

    return run


def logged(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in COMPARED if name in line} for line in lines]


def learning_rates(folder: Path) -> dict[int, float]:
    return {line["step"]: line["learning_rate"] for line in logged(folder) if "learning_rate" in line}


def test_it_learns_and_what_it_saves_loads_plainly(pretrain: Pretrain) -> None:
    run = pretrain("--max_steps 60 --eval_steps 20 --save_steps 0")
    assert math.isclose(run["losses"][0], math.log(258), rel_tol=0.05)
    assert run["eval_losses"][0] > run["eval_losses"][1] > run["eval_losses"][2]
    assert run["eval_loss"] < 2.6
    model, tokenizer = (cls.from_pretrained(run["out"]) for cls in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("the river sings and the stone", return_tensors="pt")["input_ids"]
    assert model(input_ids=ids, labels=ids).loss.item() < 3.0
    assert run["tokens"] == 60 * 8 * 64
    assert 0 < run["mfu"] < 1
    assert run["verified"]["max_diff"] == 0.0
    assert not list(run["out"].glob("checkpoint-*"))
    page = (run["out"] / "report.html").read_text()
    assert all(f'"title":"{title}"' in page for title in ("Loss", "Speed", "Step time", "Host memory", "mfu"))


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(pretrain: Pretrain) -> None:
    flags = "--save_steps 5 --eval_steps 5 --lr_scheduler_type constant"
    whole = pretrain(f"--max_steps 15 {flags}", out="whole")
    pretrain(f"--max_steps 10 {flags}", out="parts")
    started = time.perf_counter()
    resumed = pretrain(f"--max_steps 15 {flags}", out="parts")
    took = time.perf_counter() - started
    assert logged(resumed["out"]) == logged(whole["out"])
    kept = json.loads((resumed["out"] / "checkpoint-10" / "state.json").read_text())["state"]["counted"]
    assert kept["seconds"] + took / 2 < resumed["seconds"] < kept["seconds"] + took
    first, second = (load_file(run["out"] / "model.safetensors") for run in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ConfigError, match=r"checkpoints of an earlier run, the last of step 15"):
        pretrain("--max_steps 15 --resume no", out="parts")


def test_a_routers_loss_is_trained_where_the_configuration_asks_for_it(pretrain: Pretrain, tmp_path: Path) -> None:
    """The first loss is larger by the coefficient times the routers' loss, as the log says."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    first = {}
    for name, coefficient in (("without", 0.0), ("with", 0.5)):
        (tmp_path / name).mkdir()
        config = {"model_type": "mixtral", **SHAPE, **experts, "router_aux_loss_coef": coefficient}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        folder = pretrain(f"--max_steps 1 --model_config {tmp_path / name}/config.json", out=f"out-{name}")["out"]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        first[name] = next(line for line in lines if "loss" in line)
    assert first["with"]["aux_loss"] > 1
    added = first["with"]["loss"] - first["without"]["loss"]
    assert added == pytest.approx(0.5 * first["with"]["aux_loss"], rel=1e-4)


def test_long_rows_change_no_loss(pretrain: Pretrain) -> None:
    flags = "--max_steps 4 --save_steps 0 --eval_steps 0"
    whole, cut = pretrain(flags, out="whole"), pretrain(f"{flags} --long_rows", out="cut")
    assert cut["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert cut["settings"]["long_rows"] is True


def test_two_branches_decay_from_one_trunk_and_leave_it_alone(pretrain: Pretrain, tmp_path: Path) -> None:
    pretrain("--max_steps 20 --lr_scheduler_type wsd --decay_ratio 0 --warmup_steps 4 --save_steps 10", out="trunk")
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "trunk").rglob("*"))}
    assert learning_rates(tmp_path / "trunk")[20] == 3e-3
    for begin, steps in ((10, 5), (20, 8)):
        checkpoint = tmp_path / "trunk" / f"checkpoint-{begin}"
        branch = pretrain(f"--decay_from {checkpoint} --decay_steps {steps}", out=f"branch{begin}")
        rates = learning_rates(branch["out"])
        # 1 − √x over the branch's own steps (Hägele et al. 2024, section 3).
        assert rates == {
            begin + i + 1: pytest.approx(3e-3 * (1 - math.sqrt(i / steps)), rel=1e-6) for i in range(steps)
        }
        assert branch["steps"] == begin + steps
    assert {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "trunk").rglob("*"))} == before
    with pytest.raises(ConfigError, match="not a checkpoint to branch off from"):
        pretrain(f"--decay_from {tmp_path} --decay_steps 3", out="nowhere")


@pytest.fixture(scope="module")
def poisonable(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that turns one byte into NaN, whatever surrounds it."""
    from accel_scale.data.pretraining import load_pretraining_tokenizer

    folder = tmp_path_factory.mktemp("poisonable")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    with torch.no_grad():
        model.get_input_embeddings().weight[ord(POISON)] = float("nan")
    model.save_pretrained(folder)
    load_pretraining_tokenizer("byte").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_rows_that_give_nan_or_spike_are_named_and_gone_around(
    pretrain: Pretrain, poisonable: Path, inputs: Path, policy: str
) -> None:
    flags = "--max_steps 320 --eval_steps 0 --lr_scheduler_type linear --precision fp32"
    clean = pretrain(f"{flags} --guard off --save_steps 0", out="clean", model=str(poisonable))
    run = pretrain(
        f"{flags} --guard {policy} --guard_max_skips 40 --save_steps 10",
        out=policy,
        data="poisoned",
        model=str(poisonable),
    )
    events = read_events(run["out"])
    assert sum("nan" in event["reason"] for event in events) >= 1
    assert sum("above" in event["reason"] for event in events) >= 1
    assert run["eval_loss"] == pytest.approx(clean["eval_loss"], rel=0.01)
    assert run["steps"] == 320
    assert [line["step"] for line in logged(run["out"]) if "loss" in line] == list(range(1, 321))
    assert _some_row_is_poisoned(events, inputs, poisonable)
    if policy == "skip":
        assert [event["step"] for event in events] == _steps_of_skipped(events, inputs, poisonable)


def _steps_of_skipped(events: list[dict[str, Any]], inputs: Path, tokenizer: Path) -> list[int]:
    """The step that each event's batch would have been: its place among drawn batches, less earlier skipped ones."""
    from accel_scale.data.pretraining import open_pretraining_data

    data = open_pretraining_data(
        str(inputs / "poisoned.jsonl"), tokenizer=AutoTokenizer.from_pretrained(tokenizer), row_length=64,
        isolate_documents=True, seed=42,
    )  # fmt: skip
    drawn, places = data.train_loader(global_batch_size=8, micro_batch_size=4), {}
    for place in range(1, 321 + len(events)):
        places[tuple(name for names in next(drawn).row_ids for name in names)] = place
    return [places[tuple(event["rows"])] - skipped for skipped, event in enumerate(events)]


def _some_row_is_poisoned(events: list[dict[str, Any]], inputs: Path, tokenizer: Path) -> bool:
    """True if a row named by the events contains the poison."""
    from accel_scale.data.pretraining import open_pretraining_data

    data = open_pretraining_data(
        str(inputs / "poisoned.jsonl"), tokenizer=AutoTokenizer.from_pretrained(tokenizer), row_length=64
    )
    names = [name for event in events if "nan" in event["reason"] for name in event["rows"]]
    return any(POISON in data.row_text(name) for name in names)


def test_adapters_go_on_from_a_trained_model(pretrain_module: Any, pretrain: Pretrain, shared_data: Path) -> None:
    run = pretrain("--method lora --lora_r 4 --max_steps 4", model=str(shared_data / "stories260k"))
    assert (run["out"] / "adapter_model.safetensors").exists()
    assert not (run["out"] / "model.safetensors").exists()
    assert run["parameters"]["trainable"] < run["parameters"]["total"] / 4


def test_a_time_limit_saves_and_the_next_run_goes_on(pretrain: Pretrain, capsys: pytest.CaptureFixture[str]) -> None:
    first = pretrain("--max_steps 100000 --max_train_time 3s --save_steps 0 --eval_steps 0", out="timed")
    assert first["stopped_by"] == "--max_train_time"
    second = pretrain(f"--max_steps {first['steps'] + 3} --save_steps 0 --eval_steps 0", out="timed")
    assert second["steps"] == first["steps"] + 3
    assert len(second["losses"]) == 3
    capsys.readouterr()
    third = pretrain(f"--max_steps {first['steps'] + 3} --save_steps 0 --eval_steps 0", out="timed")
    assert third["losses"] == second["losses"]
    assert "nothing is left to do" in capsys.readouterr().out, "though the newest checkpoint is that of the stop"


def test_a_finished_run_says_so_and_trains_no_step(pretrain: Pretrain, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--max_steps 3 --save_steps 0 --eval_steps 0"
    first = pretrain(flags)
    before = logged(first["out"])
    capsys.readouterr()
    assert pretrain(flags)["losses"] == first["losses"]
    said = capsys.readouterr().out
    assert f"{first['losses'][0]:.4f} → {first['losses'][-1]:.4f} in 3 steps" in said
    assert "finished after 3 steps: nothing is left to do" in said
    assert logged(first["out"]) == before


def test_a_tracker_is_known_and_installed_or_named(pretrain: Pretrain) -> None:
    with pytest.raises(ConfigError, match=r"--report_to: tensorbord is no tracker.*choose from .*tensorboard"):
        pretrain("--max_steps 2 --report_to tensorbord")
    with pytest.raises(ConfigError, match="--report_to: comet_ml is not installed"):
        pretrain("--max_steps 2 --report_to comet_ml")


def test_a_profile_and_a_prediction_are_written_where_asked_for(pretrain: Pretrain) -> None:
    run = pretrain("--max_steps 6 --profile_steps 2 --memory_summary --plan check")
    held = memory_by_kind(run["out"] / "memory" / "end-rank-0.txt")
    assert held["weights"] == 4 * run["parameters"]["total"]
    assert held["optimizer states"] == pytest.approx(2 * held["weights"], rel=0.01)  # plus a step counter for each
    assert (run["out"] / "profile" / "trace.json").stat().st_size > 1000
    assert "aten::" in (run["out"] / "profile" / "operations.txt").read_text()
    plan = run["plan"]
    assert plan["compared"]["allocated_bytes"] == pytest.approx(plan["measured"]["allocated_bytes"], rel=0.05)


def test_memory_that_runs_out_leaves_a_summary(pretrain: Pretrain, tmp_path: Path, monkeypatch: Any) -> None:
    """The summary is written unasked: it shows which memory to reduce."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    def fail(self: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(LlamaMLP, "forward", fail)
    with pytest.raises(SystemExit) as stopped:
        pretrain("--max_steps 2")
    assert stopped.value.code == OUT_OF_MEMORY_STATUS
    held = memory_by_kind(tmp_path / "out" / "memory" / "out-of-memory-step-1-rank-0.txt")
    assert held["weights"] > 100_000
    assert "optimizer states" not in held  # the first step had no states yet


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_saves_and_ends_it(
    inputs: Path, repository: Path, tmp_path: Path, number: int
) -> None:
    line = f"--model_config {inputs}/config.json --tokenizer byte --data {inputs}/clean.jsonl {COMMON}"
    line = line.replace("--dataloader_num_workers 0", "--dataloader_num_workers 1")
    line += f" --max_steps 100000 --save_steps 0 --eval_steps 0 --output_dir {tmp_path / 'run'}"
    command = [sys.executable, str(repository / "recipes" / "pretrain.py"), *line.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, number)  # as schedulers and terminals do: the loader's workers get the signal as well
    out, _ = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED
    last = logged(tmp_path / "run")[-1]["step"]
    name = signal.Signals(number).name
    assert out.splitlines()[-1] == f"saved checkpoint-{last} after {name}; the same command continues from there"
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [f"checkpoint-{last}"]


def soaked(python: str, repository: Path, folder: Path, *flags: str) -> str:
    """Table of benchmarks/pretrain_soak.py, which fails if a bit differs."""
    command = [python, str(repository / "benchmarks" / "pretrain_soak.py"), *flags, "--results", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return (folder / "pretrain_soak.md").read_text()


def test_a_kill_changes_nothing(repository: Path, tmp_path: Path, real_python: str) -> None:
    flags = ["--strategies", "single", "--kills", "1", "--steps", "18", "--longest", "2"]
    table = soaked(real_python, repository, tmp_path, *flags)
    assert "| single | 1 |" in table


@pytest.mark.soak
def test_kills_of_two_ranks_change_nothing(repository: Path, tmp_path: Path, real_python: str) -> None:
    flags = ["--strategies", "ddp", "fsdp2", "zero2", "--kills", "5"]
    assert soaked(real_python, repository, tmp_path, *flags).count("the same, bit for bit") == 3


@pytest.mark.soak
def test_poisoned_data_under_every_strategy(repository: Path, tmp_path: Path) -> None:
    script = str(repository / "benchmarks" / "pretrain_poison.py")
    command = [sys.executable, script, "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.soak
def test_real_text_is_learned(repository: Path, shared_data: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    flags = ["--config_file", "recipes/configs/pretrain_shakespeare.yaml", "--output_dir", str(tmp_path / "run")]
    text = str(shared_data / "tinyshakespeare" / "input.txt")
    command = [*launch, "recipes/pretrain.py", *flags, "--data", text, "--precision", "fp32"]
    subprocess.run(command, check=True, cwd=repository, timeout=3000)
    assert json.loads((tmp_path / "run" / "run_summary.json").read_text())["eval_loss"] <= 1.75
