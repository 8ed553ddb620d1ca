"""Processes that share each matrix product train like one process, and leave a plain model behind."""

from __future__ import annotations

import pytest
from torchrun import cases

pytestmark = pytest.mark.slow
SCRIPT = "tensor_parallel_run.py"


@pytest.fixture(scope="module")
def pair():
    return cases(SCRIPT, 2, "pair")


def test_losses_norms_and_weights_are_those_of_one_process(pair):
    trained = {name: case for name, case in pair.items() if "weights" in case}
    assert len(trained) == 9
    for name, case in trained.items():
        # bf16 rounds sums of different lengths differently; Adam's first steps divide such noise by itself.
        bound = 2e-2 if "bf16" in name else 1e-5
        assert case["learned"] > 0.1, name
        assert case["clipped"] > 0.5, name
        assert case["loss"] < bound, name
        assert case["norm"] < bound, name
        assert case["weights"] < 10 * bound, name


def test_whole_weights_are_the_same_bits_on_both_ranks(pair):
    assert all(case["same"] for case in pair.values() if "same" in case)
    assert pair["dropout"]["same"]


def test_plain_transformers_loads_what_was_trained(pair):
    differences = {name: case["reload"] for name, case in pair.items() if "reload" in case}
    assert len(differences) == 9
    assert max(differences.values()) < 1e-5


def test_ranks_hold_half_of_the_model_and_tied_weights_once(pair):
    for name in ("llama", "qwen3, packed", "gemma", "gpt2"):
        assert 0.5 < pair[name]["held"] < 0.57, name
    assert pair["gemma"]["tied"]
    assert pair["gpt2"]["tied"]
    assert not pair["llama"]["tied"]


def test_a_layer_sums_hidden_states_twice_in_each_direction(pair):
    assert pair["traffic of llama"] == {"calls": 4, "hidden_states": 4.0, "calls_beside_layers": 3}
    assert pair["traffic of gpt2"] == {"calls": 4, "hidden_states": 4.0, "calls_beside_layers": 3}
    # Plus the gradients of the two norms on heads, 16 numbers each.
    assert pair["traffic of qwen3"] == pytest.approx(
        {"calls": 6, "hidden_states": 4.0, "calls_beside_layers": 3}, rel=0.01
    )


def test_accuracy_large_heads_and_generation(pair):
    case = pair["evaluation"]
    assert case["correct"][0] == case["correct"][1] >= 22
    assert case["head_gradient"] < 1e-5
    assert case["generated"]


def test_gradients_of_every_architecture_with_a_plan(pair):
    assert len(pair["architectures"]) == 23
    assert max(pair["architectures"].values()) < 1e-5, pair["architectures"]


def test_with_weights_sharded_by_fsdp2():
    sharded = cases(SCRIPT, 4, "sharded")
    mixed = sharded.pop("mixed meshes")
    assert max(mixed.values()) < 1e-5
    assert set(sharded) == {"llama", "llama, head apart", "gpt2"}
    for name, case in sharded.items():
        assert case["learned"] > 0.1, name
        assert case["loss"] < 1e-5, name
        assert case["norm"] < 1e-5, name
        assert case["weights"] < 1e-4, name
        assert case["reload"] < 1e-5, name
        assert case["same"], name
        assert case["held"] < 0.3, name
        assert case["resumed"] == 0.0, name
