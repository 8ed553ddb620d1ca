"""`accel-scale plan` as a user runs it: tables, JSON, exit statuses, and one clear line for each mistake."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from accel_scale.cli.main import main
from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.planning.search.requests import build_request, model_for_recipe, with_lengths
from accel_scale.planning.search.search import search
from accel_scale.planning.search.wish import Wish

GIB = 2**30
SMALL = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(SMALL))
    return str(path.parent)


def plan(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Returns (exit status, stdout, stderr)."""
    try:
        status = main(["plan", *words])
    except SystemExit as stop:
        status = int(stop.code or 0)
    return status, *capsys.readouterr()


def as_json(*words: str, capsys: pytest.CaptureFixture[str]) -> dict:
    status, out, _ = plan(*words, "--json", capsys=capsys)
    return {**json.loads(out), "status": status}


def test_table_says_what_fits_and_why_the_rest_does_not(capsys):
    status, out, _ = plan("Llama-3.1-8B", "--gpu", "4090", "--method", "auto", "--host_memory", "64GiB", capsys=capsys)
    assert status == 0
    first = out.splitlines()[0]
    assert all(text in first for text in ("Llama-3.1-8B", "8.03B parameters", "1 × RTX 4090", "64 × 2048 tokens"))
    assert re.search(r"│ +\d+\.\d ± \d\.\d GiB │ +\d+(\.\d+)? s │ +[\d,]+ │ +\d+%│", out)
    assert re.search(r"one GPU, full: \d+ GiB > 23.5 GiB: \w+ [\d.]+ GiB \(full checkpointing, micro-batch 1", out)
    assert re.search(r"ZeRO-3 \+ CPU offload, full: \d+ GiB of host memory > 64 GiB", out)


def test_explained_terms_add_up_to_what_the_card_shows(small, capsys):
    words = (small, "--gpu", "A100-80GB", "--num_gpus", "2", "--strategy", "zero2")
    status, out, _ = plan(*words, "--explain", capsys=capsys)
    assert status == 0
    rows = dict(re.findall(r"│([^│]+?) *│ *([\d.]+) GiB│", out))
    parts = [float(value) for name, value in rows.items() if name.startswith(("in tensors", "+"))]
    assert sum(parts) == pytest.approx(float(rows["= on the card"]), abs=0.03)
    assert float(rows["+ NCCL"]) > 0
    assert float(rows["upper end, which must fit"]) > float(rows["= on the card"]) > float(rows["lower end"])
    assert "host memory of a rank" in out
    assert "one optimizer step" in out


@pytest.mark.slow
def test_json_holds_everything(small, capsys):
    words = ("--gpu", "4090", "--method", "auto", "--tokens", "1B", "--price_per_gpu_hour", "2")
    found = as_json(small, *words, capsys=capsys)
    assert found["status"] == 0
    best = found["candidates"][0]
    assert set(best) == {"strategy", "setup", "memory", "time", "budget"}
    assert best["budget"]["hours"] == pytest.approx(1e9 / best["time"]["tokens_per_second"] / 3600)
    assert best["budget"]["price"] == pytest.approx(2 * best["budget"]["gpu_hours"])
    memory = best["memory"]
    assert memory["low_bytes"] < memory["device_bytes"] < memory["high_bytes"] <= 23.6 * GIB
    peak = sum(memory["phases"][memory["peak_phase"]].values())
    assert peak == pytest.approx(memory["allocated_bytes"], abs=10)
    assert {c["setup"]["method"] for c in found["candidates"]} == {"full", "lora", "qlora"}


def test_nothing_fits_names_the_nearest_miss_and_what_would_help(capsys):
    words = ("Llama-3.1-8B", "--gpu", "4090", "--strategy", "one GPU")
    status, out, _ = plan(*words, capsys=capsys)
    assert status == 1
    assert re.search(r"Nothing fits\. Nearest: one GPU, full, 9\d\.\d ± \d+\.\d GiB per GPU: \d+ GiB > 23\.5 GiB", out)
    assert "would fit: --method lora" in out
    assert as_json(*words, capsys=capsys)["status"] == 1
    # The setting that is said to fit does fit.
    assert plan(*words, "--method", "lora", capsys=capsys)[0] == 0


@pytest.mark.slow
def test_more_gpus_are_named_where_no_single_change_is_enough(capsys):
    words = ("Llama-3.1-405B", "--gpu", "L40S", "--num_gpus", "8", "--strategy", "DDP", "--host_memory", "64GiB")
    status, out, _ = plan(*words, "--method", "lora", "--global_batch_size", "1024", capsys=capsys)
    assert status == 1
    more = re.search(r"would fit: --num_gpus (\d+) \((FSDP2|ZeRO-)", out)
    assert more, out
    assert int(more.group(1)) >= 64


def test_an_unnamed_card_has_no_times(small, capsys):
    status, out, _ = plan(small, "--gpu", "24GiB", capsys=capsys)
    assert status == 0
    assert "no time:" in out
    assert "one GPU" in out.splitlines()[4]
    found = as_json(small, "--gpu", "24GiB", capsys=capsys)
    assert [c["time"] for c in found["candidates"]] == [None] * len(found["candidates"])


def test_unknown_speeds_are_said_with_the_flag_that_gives_them(small, capsys):
    many = (small, "--gpu", "H100-SXM", "--num_gpus", "16")
    assert "give --network" in plan(*many, capsys=capsys)[1]
    out = plan(*many, "--network", "infiniband-ndr", capsys=capsys)[1]
    assert "give --network" not in out
    assert "give --nvme, like 6GB" in out
    out = plan(*many, "--network", "infiniband-ndr", "--nvme", "6GB", capsys=capsys)[1]
    assert "no time" not in out


def test_a_gpu_that_waits_for_the_host_is_said_with_what_helps(capsys):
    """Short rows of a small model; with an 8B model and long rows nothing is said."""

    def notes(*words: str) -> str:
        status, printed, _ = plan(*words, "--gpu", "H100", "--top", "1", capsys=capsys)
        assert status == 0
        return " ".join(printed.split())

    asked = ("Qwen/Qwen3-0.6B", "--method", "lora", "--max_length", "512", "--global_batch_size", "2")
    short = notes(*asked, "--no_packing")
    found = re.search(
        r"waits for the host, .* for (\d+)% of a step: with --torch_compile true .* take ([\d.]+) s", short
    )
    assert found is not None, short
    assert int(found[1]) > 50
    assert float(found[2]) < 0.07
    assert "of a step: longer rows or larger micro-batches" in notes(*asked), "compiled, packed rows are refused"
    small = notes("Qwen/Qwen3-0.6B", "--method", "qlora", "--max_length", "512", "--global_batch_size", "2")
    assert "of a step: longer rows or larger micro-batches" in small
    long = notes("meta-llama/Llama-3.1-8B", "--method", "lora", "--max_length", "8192")
    assert "waits for the host" not in long


def test_no_gpu_here_is_one_line(small, capsys, monkeypatch):
    monkeypatch.setattr("accel_scale.facts.hardware.detect_local", lambda: None)
    status, _, err = plan(small, capsys=capsys)
    assert status == 2
    assert err.count("\n") == 1
    assert "--gpu" in err
    assert "24GiB" in err


def test_this_machine_is_used_where_no_card_is_named(small):
    here = Machine(find_gpu("4090"), num_gpus=2, gpus_per_node=2, host_memory_bytes=64 * GIB)
    assert build_request(Wish(small), detect=lambda: here).machine == here
    assert build_request(Wish(small, num_gpus="1"), detect=lambda: here).machine.num_gpus == 1


BAD = {
    "misspelt GPU": (["--gpu", "H10O"], "--gpu", "H100"),
    "misspelt method": (["--method", "qlorra"], "--method", "did you mean qlora?"),
    "misspelt precision": (["--precision", "bf61"], "--precision", "did you mean bf16?"),
    "misspelt optimizer": (["--optim", "adamw_torch_fuzed"], "--optim", "did you mean adamw_torch_fused?"),
    "misspelt checkpointing": (["--checkpointing_policy", "ful"], "--checkpointing_policy", "full"),
    "misspelt attention": (["--attn_implementation", "flash_attention2"], "--attn_implementation", "_attention_2?"),
    "misspelt strategy": (["--strategy", "zero5"], "--strategy", "ZeRO-"),
    "misspelt network": (["--network", "infinband-ndr"], "--network", "infiniband-ndr"),
    "misspelt target": (["--method", "lora", "--lora_target_modules", "q_prj"], "--lora_target_modules", "q_proj?"),
    "negative length": (["--max_length", "-5"], "--max_length", "-5"),
    "no length": (["--max_length", "0"], "--max_length", "above 0"),
    "half a batch": (["--global_batch_size", "1.5"], "--global_batch_size", "1.5"),
    "indivisible batch": (["--num_gpus", "6"], "--global_batch_size", "multiple of 6"),
    "indivisible micro-batch": (["--per_device_train_batch_size", "48"], "--global_batch_size", "multiple of 48"),
    "indivisible nodes": (["--num_gpus", "12", "--global_batch_size", "48"], "--num_gpus", "multiple of 8"),
    "rank 0": (["--method", "lora", "--lora_r", "0"], "--lora_r", "above 0"),
    "dropout of everything": (["--method", "lora", "--lora_dropout", "1"], "--lora_dropout", "like 0.05"),
    "memory without a number": (["--host_memory", "much"], "--host_memory", "24GiB"),
    "no fp8 on the card": (["--precision", "fp8", "--gpu", "A100-80GB-SXM"], "--precision", "use bf16"),
    "no bf16 on the card": (["--precision", "bf16", "--gpu", "T4"], "--precision", "use fp16"),
    "no tokens": (["--tokens", "-1"], "--tokens", "-1"),
    "price of nothing": (["--price_per_gpu_hour", "2"], "--price_per_gpu_hour", "--tokens"),
    "no rows": (["--top", "0"], "--top", "above 0"),
    "packing maybe": (["--packing", "maybe"], "--packing", "true"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_with_place_and_fix(case, small, capsys):
    words, place, hint = BAD[case]
    gpu = [] if "--gpu" in words else ["--gpu", "4090"]
    status, out, err = plan(small, *gpu, *words, capsys=capsys)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"accel-scale plan: error: {place}: ")
    assert hint in err.partition(place)[2]
    assert " Fix: " in err


def test_bad_models_are_one_line(tmp_path, capsys):
    strange = tmp_path / "config.json"
    strange.write_text(json.dumps({**SMALL, "model_type": "llamma"}))
    cases = {"Lama-3.1-8B": "meta-llama/Llama-3.1-8B", str(strange): "did you mean llama?", str(tmp_path / "x"): "x"}
    for model, hint in cases.items():
        status, out, err = plan(model, "--gpu", "4090", capsys=capsys)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert hint in err
    status, _, err = plan("gpt2", "--gpu", "4090", "--max_length", "2048", capsys=capsys)
    assert status == 2
    assert "1024" in err


def test_a_hub_out_of_reach_is_asked_once_and_shortly(repository):
    env = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "http_proxy")}
    done = subprocess.run(
        [sys.executable, "-m", "accel_scale.cli.main", "plan", "owner/no-such-model", "--gpu", "4090"],
        capture_output=True, text=True, cwd=repository, env={**env, "HF_ENDPOINT": "http://127.0.0.1:9"}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "MODEL: no model 'owner/no-such-model': not in the catalogue or the local cache, and the hub" in done.stderr
    assert " Fix: use one of " in done.stderr


@pytest.mark.slow
def test_lengths_make_padded_rows_shorter_and_packed_attention_cheaper(small):
    asked = build_request(Wish(small, gpu="4090", packing=False, method="lora"))
    measured = with_lengths(asked, mean_tokens=150.0, longest_tokens=700, packed_fill=0.97)
    assert (measured.sequence_length, measured.fixed["mean_length"]) == (700, 150.0)
    packed = build_request(Wish(small, gpu="4090", method="lora"))
    filled = with_lengths(packed, mean_tokens=150.0, longest_tokens=700, packed_fill=0.97)
    assert (filled.sequence_length, filled.document_length) == (2048, 150.0)
    step = search(packed).best.time.step_seconds
    assert search(filled).best.time.step_seconds < step
    # Padding is not progress: fewer tokens per second, although shorter rows take less time.
    assert search(measured).best.time.tokens_per_second < search(filled).best.time.tokens_per_second


@pytest.mark.slow
def test_lengths_of_a_data_file_are_measured(shared_data, capsys):
    rows = ["--dataset_name", str(shared_data / "gsm8k" / "train.jsonl")]
    rows += ["--columns", "prompt=question", "completion=answer"]
    words = (str(shared_data / "stories260k"), "--gpu", "4090", "--max_length", "512", *rows)
    found = as_json(*words, capsys=capsys)
    padded = as_json(*words, "--no_packing", capsys=capsys)
    assert 100 < padded["candidates"][0]["setup"]["mean_length"] < 512
    assert found["document_length"] == pytest.approx(padded["candidates"][0]["setup"]["mean_length"])
    assert any("1000 rows measured" in note for note in found["notes"])


def test_missing_data_is_one_line(small, tmp_path, capsys):
    broken = tmp_path / "rows.jsonl"
    broken.write_text('{"prompt": 1\n')
    status, _, err = plan(small, "--gpu", "4090", "--dataset_name", str(broken), capsys=capsys)
    assert status == 2
    assert "rows.jsonl" in err
    assert err.count("\n") == 1


def test_scores_that_are_capped_need_eager_attention():
    assert build_request(Wish("google/gemma-2-2b", gpu="4090")).fixed["attention"] == "eager"
    assert "attention" not in build_request(Wish("google/gemma-3-1b-pt", gpu="4090")).fixed


def test_names_of_models_become_what_a_recipe_can_load(small):
    assert model_for_recipe("llama-3.1-8b") == "meta-llama/Llama-3.1-8B"
    assert model_for_recipe("llama-2-7b-chat-hf") == "meta-llama/Llama-2-7b-chat-hf"
    assert model_for_recipe("nobody/knows-this") == "nobody/knows-this"
    assert model_for_recipe(f"{small}/config.json") == model_for_recipe(small) == str(Path(small).resolve())


def test_strategies_answer_to_labels_and_launch_files(small):
    def label(text: str, gpus: str) -> str:
        return build_request(Wish(small, gpu="4090", num_gpus=gpus, strategy=(text,))).strategies[0]

    assert label("zero-3", "2") == label("accelerate_configs/zero3.yaml", "2") == "ZeRO-3"
    assert label("fsdp2_offload", "2") == label("FSDP2 + cpu offload", "2") == "FSDP2 + CPU offload"
    assert label("zero_infinity", "1") == "ZeRO-Infinity"
    with pytest.raises(ConfigError, match="1 GPU"):
        label("DDP", "1")


def test_help_is_fast_and_loads_no_torch(small):
    code = (
        "import sys; from accel_scale.cli.main import main\n"
        "try: print(main(sys.argv[1:]))\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'datasets') if m in sys.modules])"
    )
    for words in (["--help"], [small, "--gpu", "4090"]):
        done = subprocess.run([sys.executable, "-c", code, "plan", *words], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"
    seconds = []
    for _ in range(3):
        before = cpu_seconds_of_children()
        subprocess.run([sys.executable, "-c", code, "plan", "--help"], capture_output=True, check=True)
        seconds.append(cpu_seconds_of_children() - before)
    # CPU time equals wall time on a machine that does nothing else.
    assert min(seconds) < 0.3


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
