"""A small side-by-side comparison of the recipe and TRL's script, each with its defaults: speed and loss.

Both run at the same time, on one thread each, and CPU seconds are compared, so that other load on the machine does
not matter. The full comparison, in wall-clock time, is benchmarks/sft_side_by_side.py.
"""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmark(repository):
    path = repository / "benchmarks" / "sft_side_by_side.py"
    spec = importlib.util.spec_from_file_location("sft_side_by_side", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["sft_side_by_side"] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sft_side_by_side"]


@pytest.mark.soak
def test_the_recipe_is_faster_than_trls_defaults(benchmark, tmp_path):
    workload = benchmark.WORKLOADS["embedded"](tmp_path, 240)
    groups = benchmark.contestants(workload)
    pair = {"trl": groups["trl_defaults"][0], "ours": groups["accel_scale"][0]}
    with ThreadPoolExecutor(2) as pool:
        runs = {
            name: pool.submit(benchmark.run_once, contestant, workload, tmp_path / name, num_threads=1)
            for name, contestant in pair.items()
        }
        trl, ours = runs["trl"].result(), runs["ours"].result()
    # Each uses the same documents once, and about as many optimizer steps.
    assert ours["num_tokens"] == trl["num_tokens"] == sum(benchmark.document_lengths(workload))
    assert abs(ours["num_steps"] - trl["num_steps"]) <= 1
    assert ours["num_steps"] >= 3
    assert ours["tokens_per_cpu_second"] > 1.5 * trl["tokens_per_cpu_second"]
    assert ours["evaluation_loss"] < 1.05 * trl["evaluation_loss"]
    assert 0 < ours["training_resident_bytes"] < ours["peak_resident_bytes"] < 4 * 2**30
