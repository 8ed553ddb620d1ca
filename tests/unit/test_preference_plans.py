"""Plans for pairs and for rewards: the reference model, what is generated, and what is refused."""

from __future__ import annotations

import pytest

from accel_scale import plan
from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import find_gpu
from accel_scale.planning.cost.generation import cache_bytes, generation_bytes
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.training_setup import GenerationSetup, TrainingSetup, VllmSetup
from accel_scale.planning.tape.head import TILE_TOKENS, TILE_VOCABULARY
from accel_scale.planning.traced.forward import forward_bytes

MODEL = "meta-llama/Llama-3.1-8B"
CARD = {"gpu": "H100", "num_gpus": 8, "strategy": "FSDP2"}
SETUP = TrainingSetup(loss="log_probs", packing=False, micro_batch_size=2, sequence_length=1024)


def phases(setup: TrainingSetup, **options: bool) -> dict[str, dict[str, float]]:
    found = predict_memory(load_model_facts(MODEL), setup, **options)
    return {phase.name: dict(phase.terms) for phase in found.phases}


def test_full_pairs_hold_a_copy_and_adapters_hold_none():
    kept, without = (
        plan(MODEL, recipe="dpo", method="full", precompute_ref_log_probs=known, **CARD).best
        for known in (False, True)
    )
    assert kept.setup.reference_model
    assert kept.setup.reference_pass == "within"
    assert (without.setup.reference_model, without.setup.reference_pass) == (False, "none")
    lora = plan(MODEL, recipe="dpo", method="lora", **CARD).best.setup
    assert (lora.reference_model, lora.reference_pass) == (False, "within")
    assert lora.micro_batch_size % 2 == 0, "a pair is two rows"


def test_the_references_pass_takes_time_and_room_beside_the_graph():
    adapters = {"method": "lora", "reference_pass": "within"}
    found = phases(TrainingSetup(**{**SETUP.__dict__, **adapters}))
    graph = found["reference"]["activations and loss"]
    assert 0 < graph < found["forward and loss"]["activations and loss"]
    assert found["reference"]["reference's pass"] > 2 * 1024 * 14336 * 2, "one layer's MLP is at work"
    settings = {"gpu": "H100", "method": "lora", "recipe": "dpo", "checkpointing_policy": "full"}
    settings |= {"per_device_train_batch_size": 2}
    within, before = (
        plan(MODEL, precompute_ref_log_probs=known, **settings).best.time.step_seconds for known in (False, True)
    )
    assert within / before == pytest.approx(1 + 1 / 4, rel=0.01), "one more pass beside three and the recomputation"


def test_a_share_of_one_row_is_too_small_for_ktos_kl_term_and_says_so():
    wish = {"gpu": "H100", "num_gpus": "4", "recipe": "kto", "method": "lora", "strategy": ["DDP"]}
    (refused,) = plan("Llama-3.2-1B", global_batch_size=4, **wish).rejections
    assert refused.reason == "a micro-batch has at least 2 rows, for the KL term."
    found = plan("Llama-3.2-1B", global_batch_size=8, **wish).best
    assert found is not None
    assert (found.setup.micro_batch_size, found.setup.accumulation) == (2, 1)


def test_the_kl_term_of_labelled_answers_takes_two_passes_more_and_a_second_row():
    settings = {"gpu": "H100", "method": "lora", "recipe": "kto", "checkpointing_policy": "full"}
    settings |= {"per_device_train_batch_size": 2}
    found, known = (plan(MODEL, precompute_ref_log_probs=known, **settings).best for known in (False, True))
    pairs = plan(MODEL, **{**settings, "recipe": "dpo", "per_device_train_batch_size": 1}).best
    assert found.setup.kl_rows
    assert found.memory.peak_bytes == pytest.approx(pairs.memory.peak_bytes), "scored rows come one after another"
    assert [found.setup.scoring_passes, known.setup.scoring_passes, pairs.setup.scoring_passes] == [3, 1, 1]
    alone = TrainingSetup(**{**known.setup.__dict__, "kl_rows": False})
    assert alone.scoring_passes == 0
    ratio = (1 + 3 / 4) / (1 + 1 / 4)
    assert found.time.step_seconds / known.time.step_seconds == pytest.approx(ratio, rel=0.01)
    small = {**settings, "global_batch_size": 4}
    small.pop("per_device_train_batch_size")
    assert plan(MODEL, **{**small, "gpu": "24GiB", "method": "qlora"}).best.setup.micro_batch_size >= 2
    assert plan(MODEL, **{**settings, "per_device_train_batch_size": 1}).best is None


def test_rloo_keeps_a_reference_and_writes_two_answers_where_nothing_is_said():
    settings = {**CARD, "method": "full"}
    found = plan(MODEL, recipe="rloo", **settings).best.setup
    assert (found.reference_model, found.reference_pass) == (True, "before")
    assert not plan(MODEL, recipe="rloo", beta=0.0, **settings).best.setup.reference_model
    assert plan(MODEL, recipe="rloo", global_batch_size=8 * 6, **settings).best is not None
    with pytest.raises(ConfigError, match="25 answers a step are not groups of 2"):
        plan(MODEL, recipe="rloo", global_batch_size=25, gpu="H100", method="lora")


def test_the_figures_of_the_tiles_are_trls():
    from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    assert (TILE_TOKENS, TILE_VOCABULARY) == (TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE)


def test_log_probabilities_never_hold_all_logits():
    """For a batch of 64k tokens, whole logits would take 31 GiB in fp32; a tile takes 256 MiB in bf16."""
    long = TrainingSetup(**{**SETUP.__dict__, "method": "lora", "micro_batch_size": 64})
    short = TrainingSetup(**{**SETUP.__dict__, "method": "lora", "micro_batch_size": 32})
    more = phases(long)["forward and loss"]["activations and loss"]
    more -= phases(short)["forward and loss"]["activations and loss"]
    assert more < 32 * 1024 * 128256 * 4, "tokens cost activations; logits in fp32 alone would be more"


def test_the_cache_grows_with_rows_and_tokens_and_stops_at_a_window():
    llama, gemma = load_model_facts(MODEL), load_model_facts("google/gemma-2-9b")
    full = TrainingSetup(precision="bf16_true")
    assert cache_bytes(llama, full, 1, 1) == 32 * 2 * 8 * 128 * 2
    assert cache_bytes(llama, full, 16, 2048) == 16 * 2048 * cache_bytes(llama, full, 1, 1)
    short, long = cache_bytes(gemma, full, 1, 4096), cache_bytes(gemma, full, 1, 8192)
    assert short < long == pytest.approx(1.5 * short), "every second layer keeps 4,096 tokens"


def test_a_plan_of_rewards_is_a_maximum_over_writing_and_training():
    settings = {"gpu": "H100", "method": "lora", "recipe": "grpo"}
    few = plan(MODEL, global_batch_size=8, per_device_train_batch_size=4, checkpointing_policy="none", **settings).best
    lean = {"per_device_train_batch_size": 1, "checkpointing_policy": "full"}
    lean |= {"max_prompt_length": 64, "max_completion_length": 960}
    many = plan(MODEL, global_batch_size=128, **lean, **settings).best
    assert few.setup.generation == GenerationSetup(8, 512, 512)
    assert many.setup.generation.rows == 128
    assert few.memory.peak_phase.name != "generation"
    assert many.memory.peak_phase.name == "generation"
    cache = dict(many.memory.peak_phase.terms)["key-value cache"]
    assert cache == 128 * 1024 * 32 * 2 * 8 * 128 * 2
    assert many.time.generation_seconds > 0
    assert many.time.step_seconds > many.time.generation_seconds


def test_answers_by_vllm_take_its_share_of_the_card_and_no_method_that_it_gets_no_weights_of():
    settings = {"gpu": "H100", "recipe": "grpo", "max_completion_length": 2048}
    ours = plan(MODEL, method="lora", **settings).best
    theirs = plan(MODEL, method="lora", vllm_gpu_memory_utilization=0.3, **settings).best
    card = find_gpu("H100").memory_bytes
    assert theirs.setup.vllm == VllmSetup(0.3 * card)
    assert ours.setup.vllm is None
    shares = [dict(phase.terms).get("vLLM's share", 0) for phase in theirs.memory.phases]
    assert shares == [0, *[0.3 * card] * (len(shares) - 1)]
    refused = plan(MODEL, method="qlora", vllm_gpu_memory_utilization=0.3, **settings)
    assert refused.best is None
    assert "quantised base rounds" in refused.rejections[0].reason
    sharded = plan(MODEL, method="lora", vllm_gpu_memory_utilization=0.3, num_gpus=8, strategy="FSDP2", **settings)
    assert sharded.best is None
    assert "FSDP shards" in sharded.rejections[0].reason
    with pytest.raises(ConfigError, match=r"does not hold its weights, 15.* GiB.*raise it") as small:
        plan(MODEL, method="lora", vllm_gpu_memory_utilization=0.1, **settings)
    assert small.value.place == "--vllm_gpu_memory_utilization"
    with pytest.raises(ConfigError, match="plan with --recipe grpo"):
        plan(MODEL, gpu="H100", vllm_gpu_memory_utilization=0.3)


def test_a_weight_of_the_penalty_keeps_a_reference():
    settings = {**CARD, "recipe": "grpo", "method": "full"}
    without, kept = (plan(MODEL, beta=beta, **settings).best.setup for beta in (0.0, 0.04))
    assert (without.reference_model, kept.reference_model) == (False, True)
    assert kept.reference_pass == "before"


def test_generation_without_a_graph_is_far_below_training():
    facts = load_model_facts(MODEL)
    setup = TrainingSetup(**{**SETUP.__dict__, "method": "lora", "checkpointing": "none"})
    trained = predict_memory(facts, setup).step.forward_bytes
    assert forward_bytes(facts, setup).peak_bytes < trained / 10
    answering = TrainingSetup(
        **{**setup.__dict__, "precision": "bf16_true", "generation": GenerationSetup(4, 64, 448)}
    )
    found = generation_bytes(facts, answering)
    assert found.cache_bytes == cache_bytes(facts, answering, 4, 512)
    assert 0 < found.pass_bytes < found.cache_bytes * 8


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"recipe": "sft", "num_generations": 4},
            "--num_generations: recipes/sft.py has no use for it.*--recipe grpo",
        ),
        ({"recipe": "sft", "precompute_ref_log_probs": True}, "--precompute_ref_log_probs.*--recipe dpo"),
        ({"recipe": "grpo", "max_length": 1024}, "--max_length.*--max_prompt_length and --max_completion_length"),
        ({"recipe": "grpo", "num_generations": 3}, "64 answers a step are not groups of 3"),
        ({"recipe": "grpo", "num_generations": 1}, "one answer has none to compare with"),
        ({"recipe": "grpo", "beta": "much"}, "--beta: 'much' is no weight"),
    ],
)
def test_what_a_recipe_has_no_use_for_is_named(settings, said):
    with pytest.raises(ConfigError, match=said):
        plan(MODEL, gpu="H100", method="lora", **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "rows", "prompt", "answer", "dtype"),
    [(2, 32, 96, 8, "fp32"), (8, 16, 64, 16, "fp32"), (2, 64, 16, 112, "bf16_true"), (2, 1, 64, 16, "fp32")],
)
def test_generation_is_what_transformers_generate_allocates(groups, rows, prompt, answer, dtype):
    """Prompts of different lengths: the peak is the pass over long prompts, or the cache of long answers."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from accel_scale.measuring.storages import StorageTracker
    from accel_scale.planning.models.model_config import facts_from_config
    from accel_scale.verifying.measured_memory import resident_tensors

    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=groups,
        vocab_size=512, head_dim=16,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32 if dtype == "fp32" else torch.bfloat16).eval()
    ids = torch.randint(3, 512, (rows, prompt))
    mask = torch.ones_like(ids)
    mask[: rows // 2, :3] = 0
    drawn = GenerationConfig(
        max_new_tokens=answer, min_new_tokens=answer, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    tracker = StorageTracker()
    weights = tracker.adopt(resident_tensors(model))
    with tracker, torch.no_grad():
        model.generate(input_ids=ids, attention_mask=mask, generation_config=drawn)
    setup = TrainingSetup(precision=dtype, packing=False, generation=GenerationSetup(rows, prompt, answer))
    found = generation_bytes(facts_from_config(config.to_dict(), name="small"), setup, is_cuda=False)
    assert found.total_bytes == pytest.approx(tracker.peak_bytes - weights, rel=0.03)
