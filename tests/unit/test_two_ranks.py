"""Two forked ranks: losses, gradients and weights equal those of one process, and runs resume from a checkpoint.

One case of each kind; tests/distributed launches all of them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from forked_ranks import on_ranks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_shared_matrix_products(case: str, tmp_path: Path) -> None:
    import tensor_parallel_run as script

    script.STEPS = 3
    kind, attention, packed, policy, _ = script.CASES[case]

    def ranks() -> dict[str, Any]:
        mesh: Any = script.build_mesh(script.ParallelLayout(tp=2), "cpu")
        plain = script.build(kind, attention, policy)
        expected = script.train(plain, packed=packed)
        model = script.build(kind, attention, policy)
        script.apply_tensor_parallel(model, mesh["tp"])
        found = script.train(model, packed=packed)
        state = script.gather_state(model)
        line = script.compare(found, expected, state, plain) if state else {}
        line["same"] = script.same_on_ranks([*found["losses"], *found["norms"], *script.replicated(model)])
        return line

    lines = on_ranks(2, ranks, tmp_path)
    assert all(line["same"] for line in lines)
    assert lines[0]["learned"] > 0.05
    assert lines[0]["loss"] < 1e-5
    assert lines[0]["norm"] < 1e-5
    assert lines[0]["weights"] < 1e-4, lines[0]["worst"]


def test_gradients_of_shared_products_for_every_way_to_divide_a_layer(tmp_path: Path) -> None:
    """Norms on heads, one matrix for three projections, biases added once, split inputs, gathered outputs."""
    import tensor_parallel_run as script

    kinds = ("qwen3", "phi", "olmo2", "phi3", "apertus", "gemma2")

    def ranks() -> dict[str, float]:
        mesh: Any = script.build_mesh(script.ParallelLayout(tp=2), "cpu")
        return {kind: script.gradient_difference(kind, mesh) for kind in kinds}

    for line in on_ranks(2, ranks, tmp_path):
        assert line.keys() == set(kinds)
        assert max(line.values()) < 1e-5, line


def test_accuracy_generation_dropout_and_traffic_of_shared_products(tmp_path: Path) -> None:
    import tensor_parallel_run as script

    script.STEPS = 2

    def ranks() -> dict[str, Any]:
        mesh: Any = script.build_mesh(script.ParallelLayout(tp=2), "cpu")
        traffic = {kind: script.traffic_per_layer(kind, mesh) for kind in ("llama", "gpt2", "qwen3")}
        return {**script.evaluation(mesh), "alike": script.dropout_is_alike(mesh), "traffic": traffic}

    for line in on_ranks(2, ranks, tmp_path):
        assert line["correct"][0] == line["correct"][1] >= 22
        assert line["head_gradient"] < 1e-5
        assert line["generated"]
        assert line["alike"], "ranks drop the same activations"
        usual = {"calls": 4, "hidden_states": 4.0, "calls_beside_layers": 3}
        assert line["traffic"]["llama"] == line["traffic"]["gpt2"] == usual
        assert line["traffic"]["qwen3"] == pytest.approx({**usual, "calls": 6}, rel=0.01)


@pytest.mark.parametrize(
    "case",
    [
        "llama, packed", "llama, packed, eager", "phi3, long frequencies", "qwen3, dynamic frequencies",
        "gemma3, one key head, packed",
    ],
)  # fmt: skip
def test_rows_that_are_cut(case: str, tmp_path: Path) -> None:
    import sequence_parallel_run as script

    script.STEPS = 3
    for line in on_ranks(2, lambda: script.parity(case, dist.group.WORLD), tmp_path):
        assert line["learned"] > 0.05
        assert line["forward"] < 1e-5
        assert line["loss"] < 1e-6
        assert line["weights"] < 1e-4


def test_documents_stay_apart_where_rows_are_cut(tmp_path: Path) -> None:
    import sequence_parallel_run as script

    def ranks() -> dict[str, Any]:
        group = dist.group.WORLD
        sent = [script.exchanges(f"llama, packed{after}", group) for after in ("", ", bf16")]
        return {**script.isolation(group), **script.refusal(group), **script.generation(group), "sent": sent}

    for line in on_ranks(2, ranks, tmp_path):
        assert line["cut"] == pytest.approx(line["whole"], rel=1e-6)
        assert line["other_documents_changed"] == line["cut"]
        for name in ("beginning_changed", "not_isolated", "shifted_after_the_cut"):
            assert abs(line[name] - line["cut"]) > 1e-3 * line["cut"], name
        assert line["refused"] == [True, True], "both, where one of them computes otherwise"
        assert (line["same"], line["length"]) == (True, 18), "generating takes whole rows as before"
        # 4 layers: queries, keys and values one way (4 + 2 + 2 heads of 16), outputs back (4), and their gradients.
        there, back = 2 * 24 * 8 * 16, 2 * 24 * 4 * 16
        assert line["sent"][0] == {"count": 4 * 4, "num_bytes": 4 * 2 * (there + back) * 4}
        # In bf16, and recomputed with full checkpointing.
        assert line["sent"][1] == {"count": 4 * 6, "num_bytes": 4 * 3 * (there + back) * 2}


@pytest.mark.parametrize("case", ["gpipe"])
def test_pipeline_stages(case: str, tmp_path: Path) -> None:
    import pipeline_run as script

    (chosen,) = [one for one in script.CASES if one["name"] == case]
    script.STEPS = 3

    def ranks() -> dict[str, Any]:
        script.PartialState(cpu=True)
        return script.run_case(chosen, tmp_path / "model")

    line = on_ranks(2, ranks, tmp_path)[0]
    assert line["last_loss"] < line["first_loss"]
    assert line["all_owned_once"]
    assert line["loss_error"] < 1e-5
    assert line["evaluation_error"] < 1e-5
    assert line["weight_error"] < 1e-4, line["worst_weight"]
    assert line["logits_error"] < 1e-4


def test_errors_of_powersgd_go_on_from_three_ranks_to_two(tmp_path: Path) -> None:
    import ddp_hooks_run as script

    script.START = 3
    script.POWERSGD = script.DdpSettings(1, "powersgd", script.RANK, script.START)
    assert on_ranks(2, lambda: script.from_three_ranks(script.Accelerator(cpu=True)), tmp_path) == [0.0, 0.0]


def test_memory_that_runs_out_on_one_rank_is_recovered_on_both(tmp_path: Path) -> None:
    import memory_recovery_cases as script

    faults = [("untied", "backward", 0, 1)]
    one_process = {
        name: script.train(
            None, script.MODELS[name], lambda step: script.batches_of(step, 0) + script.batches_of(step, 1)
        )
        for name in {name for name, *_ in faults}
    }

    def ranks() -> list[Any]:
        accelerator = script.Accelerator(cpu=True)
        found = []
        for name, *fault in faults:
            weights, mine, lines, recovery = script.train(
                accelerator,
                script.MODELS[name],
                lambda step: script.batches_of(step, accelerator.process_index),
                fault=tuple(fault),
            )
            expected = one_process[name][0]
            assert weights.keys() == expected.keys()
            difference = max(float((weights[key] - w).norm() / w.norm()) for key, w in expected.items())
            found.append([difference, mine, lines, recovery.recovered_steps, recovery.level])
        return found

    for (name, *_, failed), first, second in zip(faults, *on_ranks(2, ranks, tmp_path), strict=True):
        assert max(first[0], second[0]) < 1e-6
        losses = [(a + b) / 2 for a, b in zip(first[1], second[1], strict=True)]
        assert losses == pytest.approx(one_process[name][1], abs=1e-5)
        assert first[3:] == second[3:] == [[2], 1]
        assert second[2] == [], "the first rank says it"
        (line,) = first[2]
        assert line.startswith(f"warning: memory ran out in step 2 on rank {failed}; the step is taken again")
        assert "2 of its 4 rows: 2 passes per micro-batch" in line


FSDP2 = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


@pytest.mark.parametrize("layout", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_checkpoint_of_shards(layout: str, tmp_path: Path) -> None:
    """A checkpoint written while training continues holds the weights of its step; the run resumes bit for bit."""
    import checkpoint_run as script

    from accel_scale.launching.rehearsal import enable_rehearsal_if_needed

    def trained(name: str, *flags: str) -> dict[str, Any]:
        folder = tmp_path / name
        folder.mkdir()
        report = folder / "report.json"

        def ranks() -> None:
            os.environ.update(FSDP2, FSDP_STATE_DICT_TYPE=layout)
            enable_rehearsal_if_needed()  # FSDP on CPUs
            usual = ["--output_dir", str(tmp_path / "run"), "--report", str(report), "--layout", layout]
            sys.argv = ["checkpoint_run.py", *usual, "--asynchronous", *flags]
            assert not script.main()

        on_ranks(2, ranks, folder)
        return json.loads(report.read_text())

    whole = trained("whole", "--num_steps", "4", "--save_at", "2")
    written = {path.name for path in (tmp_path / "run" / "checkpoint-2").iterdir()}
    shards = {"pytorch_model_fsdp_0", "optimizer_0"}
    assert written >= (shards if layout == "SHARDED_STATE_DICT" else {"pytorch_model_fsdp.bin", "optimizer.bin"})
    again = trained("again", "--num_steps", "4")
    assert (whole["resumed"], again["resumed"]) == (None, 2)
    assert again["state"] == {"rows": 8}
    assert again["counter"] == [1, 2, 3, 4]
    for step in ("3", "4"):
        assert again["losses"][step] == whole["losses"][step]
        assert again["draws"][step] == whole["draws"][step]
    assert again["learning_rate"] == whole["learning_rate"]


def test_what_ranks_tell_each_other(tmp_path: Path) -> None:
    from accel_scale.training.checkpoints.ranks import Meeting

    def ranks() -> list[Any]:
        found = []
        for group in (Meeting(), Meeting(separate=True)):
            mine = group.rank + 5
            told = [group.rank, group.world_size, group.gather(mine), group.from_main(mine), group.largest(mine)]
            found.append(told)
        return found

    first, second = on_ranks(2, ranks, tmp_path)
    assert first == [[0, 2, [5, 6], 5, 6]] * 2
    assert second == [[1, 2, [5, 6], 5, 6]] * 2


def test_a_shared_models_shards_are_gathered_ahead_where_the_launch_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches set FSDP_FORWARD_PREFETCH for every engine; the losses do not change."""
    import tensor_parallel_run as script
    from torch.profiler import profile

    from accel_scale.parallel.data_parallel import apply_data_parallel

    def ranks() -> dict[str, Any]:
        layout = script.ParallelLayout(dp_shard=2)
        mesh: Any = script.build_mesh(layout, "cpu")
        found: dict[str, Any] = {}
        for value in ("false", "true"):
            monkeypatch.setenv("FSDP_FORWARD_PREFETCH", value)
            kind, attention, packed, policy, _ = script.CASES["llama"]
            model = script.build(kind, attention, policy)
            apply_data_parallel(model, mesh, layout)
            script.STEPS = 1
            with profile() as watched:
                losses = script.train(model, packed=packed)["losses"].tolist()
            names = [event.key for event in watched.key_averages()]
            found[value] = [losses, sum(name.startswith("FSDP::forward_prefetch") for name in names)]
        return found

    for line in on_ranks(2, ranks, tmp_path):
        assert line["false"][1] == 0
        assert line["true"][1] >= 1
        assert line["true"][0] == line["false"][0]
