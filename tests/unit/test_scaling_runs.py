"""Weak and strong scaling: the launches, and what their tokens per second amount to; one real run on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_scale.cli.main import main
from accel_scale.errors import ConfigError
from accel_scale.flags.command_line import RecipeCommand
from accel_scale.launching.launch_file import read_launch_file
from accel_scale.network.link_fit import FittedLink, MeasuredLinks, save_links
from accel_scale.planning.cost.links import Link
from accel_scale.rehearsing.scaling_runs import (
    ScalingResult,
    ScalingRun,
    command_of,
    efficiency,
    predicted_efficiency,
    scaling_runs,
    with_measured_compute,
)

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = {
    "model_type": "llama", "vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def test_weak_keeps_rows_per_rank_and_strong_rows_per_step() -> None:
    weak = [(run.num_ranks, run.global_batch_size) for run in scaling_runs([1, 2, 4], ["weak"], 8)]
    strong = [(run.num_ranks, run.global_batch_size) for run in scaling_runs([1, 2, 4], ["strong"], 8)]
    assert weak == [(1, 8), (2, 16), (4, 32)]
    assert strong == [(1, 32), (2, 32), (4, 32)]
    with pytest.raises(ConfigError, match="--kind weak"):
        scaling_runs([2, 3], ["strong"], 8)


def test_efficiency_is_per_rank_against_the_smallest_run_of_its_kind() -> None:
    results = [
        ScalingResult(ScalingRun("weak", 1, 8, 8), 1000.0, 1.0),
        ScalingResult(ScalingRun("weak", 4, 8, 32), 3600.0, 1.25),
        ScalingResult(ScalingRun("strong", 2, 8, 32), 1500.0, None),
        ScalingResult(ScalingRun("strong", 4, 8, 32), 2400.0, None),
    ]
    assert [efficiency(result, results) for result in results] == pytest.approx([1.0, 0.9, 1.0, 0.8])
    assert predicted_efficiency(results[1], results) == pytest.approx(0.8)
    assert predicted_efficiency(results[3], results) is None


def test_a_cpu_is_predicted_by_the_smallest_run_and_the_communication() -> None:
    """A rank needs 9 s of computation for 8 rows; no communication is overlapped."""
    results = [
        ScalingResult(ScalingRun("weak", 2, 8, 16), 1000.0, None, 10.0, 1.0),
        ScalingResult(ScalingRun("weak", 4, 8, 32), 1500.0, None, 12.0, 3.0),
        ScalingResult(ScalingRun("strong", 2, 8, 32), 1000.0, None, 19.0, 1.0),
        ScalingResult(ScalingRun("strong", 4, 8, 32), 1500.0, None, 13.0, 3.0),
    ]
    predicted = with_measured_compute(results)
    assert [result.predicted_step_seconds for result in predicted] == pytest.approx([10.0, 12.0, 19.0, 12.0])
    assert [predicted_efficiency(r, predicted) for r in predicted] == pytest.approx([1, 10 / 12, 1, 19 / 24])
    unknown = with_measured_compute([*results[:1], ScalingResult(ScalingRun("weak", 4, 8, 32), 1500.0, None, 12.0)])
    assert unknown[1].predicted_step_seconds is None


def test_what_says_nothing_about_speed_is_left_out(tmp_path: Path) -> None:
    launch = read_launch_file(REPOSITORY / "accelerate_configs" / "ddp_multinode.yaml")
    words = [
        "--data",
        "web",
        "--max_tokens",
        "2B",
        "--save_steps",
        "100",
        "--max_steps",
        "9",
        "--global_batch_size",
        "64",
    ]
    recipe = RecipeCommand.parse(str(REPOSITORY / "recipes" / "pretrain.py"), words)
    command = command_of(ScalingRun("weak", 2, 4, 8), launch, recipe, tmp_path / "out", 20)
    text = " ".join(command)
    assert "--num_processes 2 --main_process_port 0 --num_machines 1" in text
    assert "--max_tokens" not in text
    for flag in ("--save_steps 0", "--max_steps 20", "--global_batch_size 8", "--per_device_train_batch_size 4"):
        assert text.count(flag.split()[0] + " ") == 1
        assert flag in text


def test_how_gradients_are_sent_is_left_out_on_one_rank(tmp_path: Path) -> None:
    """The recipes refuse such flags if a single process sends no gradients."""
    launch = read_launch_file(REPOSITORY / "accelerate_configs" / "fsdp2.yaml")
    words = ["--sync_each_batch", "--ddp_comm_hook", "bf16", "--learning_rate", "1e-3"]
    recipe = RecipeCommand.parse(str(REPOSITORY / "recipes" / "pretrain.py"), words)
    one, two = (
        command_of(ScalingRun("weak", ranks, 4, 4 * ranks), launch, recipe, tmp_path / "out", 20) for ranks in (1, 2)
    )
    assert {"--sync_each_batch", "--ddp_comm_hook", "--learning_rate"} <= set(two)
    assert not {"--sync_each_batch", "--ddp_comm_hook", "bf16"} & set(one)
    assert "--learning_rate" in one


def test_too_many_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(REPOSITORY / "accelerate_configs" / "ddp.yaml")
    recipe = str(REPOSITORY / "recipes" / "pretrain.py")
    with pytest.raises(SystemExit) as leaving:
        main(["scaling-test", "--config_file", config, "--ranks", "1,512", recipe])
    assert leaving.value.code == 2
    assert "512 ranks" in capsys.readouterr().err


@pytest.mark.slow
def test_one_and_two_ranks_are_really_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "text.txt").write_text("one two river stone walks sings and the blue runs over\n" * 2000)
    config = (REPOSITORY / "accelerate_configs" / "ddp.yaml").read_text().replace("bf16", "'no'")
    (tmp_path / "ddp.yaml").write_text(config)
    recipe = [str(REPOSITORY / "recipes" / "pretrain.py"), "--model_config", str(tmp_path / "config.json")]
    recipe += ["--tokenizer", "byte", "--data", str(tmp_path / "text.txt"), "--text_documents", "line"]
    recipe += ["--max_length", "64", "--per_device_train_batch_size", "2", "--dataloader_num_workers", "0"]
    # A ring of two sends each gradient once; 1 MB/s makes communication the larger part of a step.
    fit = FittedLink("all_reduce", "ring", 2, Link(1e6, 1e-6), (), ())
    save_links(MeasuredLinks("gloo", "a processor", {"all_reduce": fit}, {}), tmp_path / "links.json")
    flags = ["--config_file", str(tmp_path / "ddp.yaml"), "--ranks", "1,2", "--kind", "weak", "--steps", "6", "--json"]
    flags += ["--links", str(tmp_path / "links.json")]
    assert main(["scaling-test", *flags, "--keep", str(tmp_path / "kept"), *recipe]) == 0
    found = json.loads(capsys.readouterr().out)
    one, two = found["runs"]
    assert (one["ranks"], one["rows_per_step"], two["ranks"], two["rows_per_step"]) == (1, 2, 2, 4)
    assert one["efficiency"] == 1.0
    assert two["efficiency"] == pytest.approx(two["tokens_per_second"] / 2 / one["tokens_per_second"])
    summary = json.loads((tmp_path / "kept" / "2_ranks_4_rows" / "run_summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["tokens_per_second"] == two["tokens_per_second"]
    [reduced] = summary["plan"]["collectives"]
    gradients = 4 * summary["parameters"]["trainable"]
    assert (reduced["kind"], reduced["num_bytes"], reduced["workers"]) == ("all_reduce", gradients, 2)
    step = 2 * 64 / one["tokens_per_second"]
    assert two["predicted_efficiency"] == pytest.approx(step / (step + gradients / 1e6), rel=0.01)
