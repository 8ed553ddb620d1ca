"""Two processes that share each row train like one process, and documents stay apart across the cut."""

from __future__ import annotations

import pytest
from torchrun import cases

from accel_scale.planning.cost.communication import step_collectives
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.tape.activations import step_bytes

pytestmark = pytest.mark.slow
SCRIPT = "sequence_parallel_run.py"


@pytest.fixture(scope="module")
def pair():
    return cases(SCRIPT, 2, "pair")


def test_losses_and_weights_are_those_of_one_process(pair):
    trained = {name: case for name, case in pair.items() if "weights" in case}
    assert len(trained) == 17
    for name, case in trained.items():
        assert case["learned"] > 0.1, name
        # bf16 rounds sums over a part and over the whole row differently, which Adam's first steps amplify.
        assert case["loss"] < (1e-3 if "bf16" in name else 1e-6), name
        assert case["weights"] < (5e-2 if "bf16" in name else 1e-4), name


def test_forward_passes_agree_for_every_architecture(pair):
    differences = {name: case["forward"] for name, case in pair.items() if "forward" in case}
    assert len(differences) == 16
    assert max(differences.values()) < 1e-5


def test_documents_stay_apart_across_the_cut(pair):
    case = pair["isolation"]
    assert case["cut"] == pytest.approx(case["whole"], rel=1e-6)
    assert case["other_documents_changed"] == case["cut"]
    # Tokens of the document do count, on whichever part they lie, and so do isolation and the shift.
    for name in ("beginning_changed", "not_isolated", "shifted_after_the_cut"):
        assert abs(case[name] - case["cut"]) > 1e-3 * case["cut"], name


def test_all_ranks_refuse_what_one_of_them_computes_otherwise(pair):
    assert pair["refusal"] == {"refused": [True, True]}


def test_generating_takes_whole_rows_as_before(pair):
    assert pair["generation"] == {"same": True, "length": 18}


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96,
    "num_key_value_heads": 2, "intermediate_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
# Cases of `sequence_parallel_run.py`: configuration, precision, checkpointing.
SENDERS = {
    "llama": (LLAMA, "fp32", "none"),
    "llama, packed, bf16": (LLAMA, "bf16", "full"),
    "gemma2, packed": ({**LLAMA, "model_type": "gemma2", "head_dim": 16}, "fp32", "every_2"),
    "gemma3, one key head": (
        {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "num_key_value_heads": 1}, "fp32", "none",
    ),
}  # fmt: skip


def setup(precision: str, checkpointing: str, length: int, *, num_rows: int, ranks: int = 2) -> TrainingSetup:
    return TrainingSetup(
        precision=precision, checkpointing=checkpointing, packing=True, micro_batch_size=num_rows,
        sequence_length=length, loss="chunked", attention="sdpa", accumulation=1,
        parallel=ParallelSetup(num_gpus=ranks, sequence_parallel=ranks),
    )  # fmt: skip


def test_each_rank_keeps_half_of_the_activations_as_planned(pair):
    case, facts = pair["memory"], facts_from_config(LLAMA, name="llama")
    assert case["kept_bytes_2"] < 0.52 * case["kept_bytes_1"]
    for ranks in (1, 2):
        plan = step_bytes(facts, setup("fp32", "none", 1024, num_rows=1, ranks=ranks), is_cuda=False, is_tracked=True)
        assert plan.saved_bytes == pytest.approx(case[f"kept_bytes_{ranks}"], rel=0.06)
        assert plan.loss_bytes == pytest.approx(case[f"peak_bytes_{ranks}"], rel=0.06)


@pytest.mark.parametrize("name", SENDERS)
def test_what_is_sent_is_what_the_planner_counts(pair, name):
    config, precision, checkpointing = SENDERS[name]
    chosen = setup(precision, checkpointing, 48, num_rows=2)
    sent = [
        entry for entry in step_collectives(facts_from_config(config, name=name), chosen) if entry.kind == "all_to_all"
    ]
    case = pair[f"exchanges of {name}"]
    assert sum(entry.count for entry in sent) == case["count"]
    assert sum(entry.count * entry.num_bytes for entry in sent) == case["num_bytes"]


@pytest.mark.soak
def test_beside_the_other_ways_of_sharing_a_model():
    sharded = cases(SCRIPT, 4, "sharded")
    assert set(sharded) == {"fsdp2", "fsdp2, gemma2", "four ranks, two key heads", "tensor parallel", "pipeline"}
    for name, case in sharded.items():
        assert case["learned"] > 0.1, name
        assert case["loss"] < 1e-6, name
        assert case.get("weights", 0.0) < 1e-4, name
