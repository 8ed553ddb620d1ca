"""Every flag of the recipe does what it says, in real runs of a real (small) model."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_scale.errors import ConfigError
from accel_scale.training.checkpoints.manifest import read_manifest

pytestmark = pytest.mark.slow


def differs(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> int:
    return sum(not torch.equal(a[name].float(), b[name].float()) for name in a)


def test_full_fine_tuning_changes_every_weight_and_loads_back_plainly(sft, shared_data: Path) -> None:
    run = sft("--learning_rate 1e-3", "--max_steps 6")
    assert run["losses"][-1] < run["losses"][0]
    before = load_file(shared_data / "stories260k" / "model.safetensors")
    after = load_file(run["out"] / "model.safetensors")
    assert differs(after, before) == len(after)
    model = AutoModelForCausalLM.from_pretrained(run["out"])
    tokenizer = AutoTokenizer.from_pretrained(run["out"])
    assert model.generation_config.eos_token_id is not None
    assert model(**tokenizer("Once", return_tensors="pt")).logits.isfinite().all()
    assert run["verified"]["max_diff"] == 0.0
    assert run["optimizer"] == "AdamW"


@pytest.mark.parametrize("flags", ["--method lora", "--method qlora", "--method lora --use_dora --use_rslora"])
def test_adapters_alone_are_trained_and_saved(sft, flags: str) -> None:
    from peft import AutoPeftModelForCausalLM

    run = sft(flags, "--lora_r 4 --learning_rate 1e-2 --lora_dropout 0")
    adapter = load_file(run["out"] / "adapter_model.safetensors")
    assert not (run["out"] / "model.safetensors").exists()
    assert any(tensor.abs().sum() > 0 for name, tensor in adapter.items() if "lora_B" in name)
    assert any("magnitude" in name for name in adapter) == ("dora" in flags)
    assert run["parameters"]["trainable"] < run["parameters"]["total"] / 4
    config = json.loads((run["out"] / "adapter_config.json").read_text())
    assert (config["use_dora"], config["use_rslora"]) == ("dora" in flags, "rslora" in flags)
    assert (run["out"] / "quantization_config.json").exists() == ("qlora" in flags)
    model = AutoPeftModelForCausalLM.from_pretrained(run["out"])
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 35


def test_a_profile_and_a_summary_of_memory_are_written_where_asked_for(sft) -> None:
    run = sft("--max_steps 6 --profile_steps 2 --memory_summary")
    assert (run["out"] / "profile" / "trace.json").stat().st_size > 1000
    assert "aten::" in (run["out"] / "profile" / "operations.txt").read_text()
    [weights] = [
        line
        for line in (run["out"] / "memory" / "end-rank-0.txt").read_text().splitlines()
        if line.startswith("weights ")
    ]
    assert weights.endswith(f" {4 * run['parameters']['total']:,} B")


def test_checkpointing_policies_train_alike(sft) -> None:
    losses = {
        policy: sft(f"--checkpointing_policy {policy}", "--max_steps 3 --learning_rate 1e-3")["losses"]
        for policy in ("none", "full", "every_2", "selective", "offload")
    }
    # The embedded model's rows have several tiles.
    losses["long rows"] = sft("--long_rows true", "--max_steps 3 --learning_rate 1e-3")["losses"]
    for policy, found in losses.items():
        assert found == pytest.approx(losses["none"], rel=1e-6), policy


def test_model_dropout_is_drawn_again_where_layers_are_recomputed(sft, capsys) -> None:
    flags = "--max_steps 3 --learning_rate 1e-3 --model_dropout"
    without = sft(flags, "0")
    dropped = sft(flags, "0.5", "--scale_lr_from_batch_size linear --lr_base_batch_size 1 --warmup_steps 0")
    assert "its first steps are not warmed up" in capsys.readouterr().out
    recomputed = sft(flags, "0.5", "--checkpointing_policy full --learning_rate 2e-3 --warmup_steps 0")
    assert dropped["losses"] != pytest.approx(without["losses"], rel=1e-3)
    assert recomputed["losses"] == pytest.approx(dropped["losses"], rel=1e-6)
    assert json.loads((dropped["out"] / "config.json").read_text())["attention_dropout"] == 0.5
    with pytest.raises(ConfigError, match="both say how much is dropped"):
        sft("--model_dropout 0.1", '--model_init_kwargs {"attention_dropout":0.2}')


@pytest.mark.parametrize("packing", ["true", "false"])
def test_accumulation_weighs_tokens_not_batches(sft, packing: str) -> None:
    # Answers differ in length, so a mean of means would differ from the mean over tokens.
    common = f"--packing {packing} --max_steps 3 --learning_rate 1e-3 --global_batch_size 8"
    whole = sft(common, "--per_device_train_batch_size 8")
    split = sft(common, "--per_device_train_batch_size 2")
    assert split["settings"]["gradient_accumulation_steps"] == 4
    assert split["losses"] == pytest.approx(whole["losses"], rel=2e-5)


def test_attention_implementations_agree_on_packed_rows(sft) -> None:
    losses = {
        name: sft(f"--attn_implementation {name}", "--max_steps 2 --learning_rate 1e-3")["losses"]
        for name in ("eager", "sdpa", "sdpa_packed")
    }
    assert losses["sdpa"] == pytest.approx(losses["eager"], rel=1e-5)
    assert losses["sdpa_packed"] == pytest.approx(losses["eager"], rel=1e-5)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.float32), ("bf16_true", torch.bfloat16), ("fp16", torch.float32)]
)
def test_precision_decides_the_weights_that_are_trained(sft, precision: str, dtype: torch.dtype) -> None:
    run = sft(f"--precision {precision}", "--max_steps 3 --learning_rate 1e-3")
    weights = load_file(run["out"] / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    assert all(math.isfinite(loss) for loss in run["losses"])


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("adamw_torch_foreach", "AdamW"),
        ("sgd_momentum", "SGD"),
        ("rmsprop", "RMSprop"),
        ("adagrad", "Adagrad"),
        ("adafactor", "Adafactor"),
        ("adamw_bnb_8bit", "AdamW"),
    ],
)
def test_the_optimizer_that_was_asked_for_runs(sft, name: str, cls: str) -> None:
    run = sft(f"--optim {name}")
    assert cls in run["optimizer"]
    assert run["settings"]["optim"] == name


def test_wsd_by_ratios(sft) -> None:
    run = sft(
        "--lr_scheduler_type wsd --warmup_ratio 0.2 --decay_ratio 0.4 --min_lr_ratio 0.1 --max_steps 10",
        "--learning_rate 1e-3 --save_strategy steps --save_steps 10",
    )
    state = json.loads((run["out"] / "checkpoint-10" / "trainer_state.json").read_text())
    rates = [entry["learning_rate"] for entry in state["log_history"] if "learning_rate" in entry]
    assert len(rates) == 10
    assert rates[2:6] == pytest.approx([1e-3] * 4)
    assert rates[0] < rates[1] <= 1e-3
    decay = rates[6:]
    assert decay == sorted(decay, reverse=True)
    assert decay[-1] >= 1e-4


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_resume_continues_exactly(sft, tmp_path: Path, method: str) -> None:
    common = f"--method {method} --learning_rate 1e-3 --max_steps 4 --save_strategy steps --save_steps 2"
    whole = sft(common)
    sft(common, out=tmp_path / "again")
    weights = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    manifest = read_manifest(tmp_path / "again" / "checkpoint-2")
    assert {weights, "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= set(manifest.files)
    shutil.rmtree(tmp_path / "again" / "checkpoint-4")  # as if the run had been killed after its second step
    resumed = sft(common, "--resume_from_checkpoint true", out=tmp_path / "again")
    assert resumed["steps"] == 4
    assert resumed["losses"] == whole["losses"]
    a, b = (load_file(run["out"] / weights) for run in (whole, resumed))
    assert differs(a, b) == 0
    assert not list(whole["out"].glob("*.partial"))


def test_a_checkpoint_of_something_else_is_refused_before_the_model_is_loaded(
    sft, shared_data: Path, tmp_path: Path
) -> None:
    saving = "--max_steps 1 --save_strategy steps --save_steps 1"
    full, lora = (sft(saving, f"--method {method}")["out"] / "checkpoint-1" for method in ("full", "lora"))
    unloadable = shutil.copytree(
        shared_data / "stories260k", tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors")
    )
    config = json.loads((unloadable / "config.json").read_text())
    (unloadable / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    no_state = shutil.copytree(full, tmp_path / "checkpoint-1")
    (no_state / "trainer_state.json").unlink()
    no_weights = shutil.copytree(full, tmp_path / "checkpoint-2")
    (no_weights / "model.safetensors").unlink()
    for folder, method, problem in (
        (tmp_path / "nowhere", "full", f"{tmp_path / 'nowhere'} is not a good checkpoint: manifest.json is missing"),
        (no_state, "full", "is not a good checkpoint: trainer_state.json is missing"),
        (no_weights, "full", "is not a good checkpoint: model.safetensors is missing"),
        (full, "full", f"model.num_hidden_layers {config['num_hidden_layers']} → 3"),
        (full, "lora", "was saved with other settings: method full → lora"),
        (lora, "full", "was saved with other settings: method lora → full"),
    ):
        flags = ("--max_steps 1", f"--method {method}", f"--resume_from_checkpoint {folder}")
        with pytest.raises(ConfigError) as refused:
            sft(*flags, f"--model_name_or_path {unloadable}")
        assert problem in str(refused.value)
        assert (refused.value.place, bool(refused.value.fix)) == ("--resume_from_checkpoint", True)


def test_bad_rows_are_named_or_counted(sft, small_gsm8k: Path, tmp_path: Path) -> None:
    lines = small_gsm8k.read_text().splitlines()
    lines[4] = lines[4][:-9]
    lines[7] = json.dumps({"question": "What?", "answer": None})
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=r"broken\.jsonl:5"):
        sft(data=path)
    run = sft("--on_bad_row skip", data=path)
    assert sum(run["skipped_rows"].values()) == 2


def test_streaming_and_mixtures(sft_module, shared_data: Path, small_gsm8k: Path, tmp_path: Path) -> None:
    common = ["--model_name_or_path", str(shared_data / "stories260k"), "--columns", "prompt=question"]
    common += ["completion=answer", "--max_steps", "2", "--max_length", "256", "--save_strategy", "no"]
    common += ["--precision", "fp32", "--per_device_train_batch_size", "2"]
    streamed = sft_module.main(
        [*common, "--dataset_name", str(small_gsm8k), "--dataset_streaming", "--output_dir", str(tmp_path / "s")]
    )
    assert streamed["steps"] == 2
    other = tmp_path / "other.jsonl"
    other.write_text(small_gsm8k.read_text())
    mixed = sft_module.main(
        [*common, "--dataset_mixture", f"{small_gsm8k}=0.5", f"{other}=0.5", "--output_dir", str(tmp_path / "m")]
    )
    assert mixed["steps"] == 2


def test_evaluation_on_rows_of_its_own(sft) -> None:
    split = "--dataset_train_split train[:80%] --dataset_test_split train[80%:]"
    run = sft(split, "--eval_strategy steps --eval_steps 2 --max_steps 2")
    assert run["eval_loss"] == pytest.approx(run["losses"][-1], rel=0.3)


def test_fp8_multiplies_in_fp8(sft) -> None:
    fp8 = sft("--precision fp8 --fp8_emulate", "--max_steps 2 --learning_rate 1e-3")
    bf16 = sft("--precision bf16", "--max_steps 2 --learning_rate 1e-3")
    assert fp8["losses"] != bf16["losses"]
    assert fp8["losses"] == pytest.approx(bf16["losses"], rel=0.02)


def test_a_cap_on_device_memory_is_refused_without_cuda(sft) -> None:
    if torch.cuda.is_available():
        pytest.skip("this is about machines without CUDA")
    with pytest.raises(ConfigError, match="--device_memory"):
        sft("--device_memory 24GiB")
