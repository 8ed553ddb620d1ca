"""Two ranks that share a model or its rows, forked from here: losses, gradients and weights are those of one process.

One case of each kind; tests/distributed launches all of them.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("case", ["llama, packed", "phi3, long frequencies", "gemma3, one key head, packed"])
def test_rows_that_are_cut(case: str, tmp_path: Path) -> None:
    import sequence_parallel_run as script

    script.STEPS = 3
    for line in on_ranks(2, lambda: script.parity(case, dist.group.WORLD), tmp_path):
        assert line["learned"] > 0.05
        assert line["forward"] < 1e-5
        assert line["loss"] < 1e-6
        assert line["weights"] < 1e-4


@pytest.mark.parametrize("case", ["gpipe", "interleaved"])
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
