"""The planner's activation memory against tensors that real models allocate, and invariants that must always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from activation_models import (
    DROPOUTS,
    EAGER_ONLY,
    FIELDS,
    LORA,
    PLAIN,
    VARIANTS,
    predicted,
    real_bytes,
    real_inputs,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accel_scale.errors import ConfigError
from accel_scale.planning.cost.strategies import conflict
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.training_setup import LoraSetup, ParallelSetup, TrainingSetup
from accel_scale.planning.tape.activations import _walk, step_bytes

# A few setups for all families, all setups for one family.
FAMILY_SETUPS = {
    "fp32": PLAIN,
    "bf16, checkpointed": replace(PLAIN, precision="bf16", checkpointing="full"),
    "eager, whole logits": replace(PLAIN, attention="eager", loss="full"),
}
TILED = replace(PLAIN, long_rows=True, sequence_length=256)
LONG_SETUPS = {
    "kept": TILED,
    "recomputed": replace(TILED, checkpointing="full", precision="bf16"),
    "adapters, offloaded": replace(LORA, long_rows=True, sequence_length=256, checkpointing="offload"),
}
LLAMA_SETUPS = {
    "bf16": replace(PLAIN, precision="bf16"),
    "true bf16": replace(PLAIN, precision="bf16_true", loss="full"),
    "every second layer": replace(PLAIN, checkpointing="every_2"),
    "selective": replace(PLAIN, checkpointing="selective", precision="bf16"),
    "attention recomputed": replace(PLAIN, checkpointing="attention"),
    "mlp recomputed": replace(PLAIN, checkpointing="mlp", precision="bf16"),
    "segments": replace(PLAIN, checkpointing="segments"),
    "segments of three, bf16": replace(PLAIN, checkpointing="segments_3", precision="bf16"),
    "offload": replace(PLAIN, checkpointing="offload"),
    "lora": LORA,
    "lora, checkpointed": replace(LORA, checkpointing="full"),
    "lora, segments": replace(LORA, checkpointing="segments_2"),
    "lora of two projections": replace(LORA, lora=LoraSetup(rank=4, targets=("q_proj", "v_proj"))),
    "dora": replace(LORA, lora=LoraSetup(rank=8, dora=True)),
    "padded": replace(PLAIN, mean_length=72),
    "packed, eager": replace(PLAIN, packing=True, attention="eager"),
    "one row": replace(PLAIN, micro_batch_size=1, attention="eager"),
    "fused": replace(PLAIN, fused=("RMSNorm", "RoPE", "SwiGLU")),
    "fused, bf16": replace(PLAIN, fused=("RMSNorm", "RoPE", "SwiGLU"), precision="bf16"),
    "fused, true bf16": replace(PLAIN, fused=("RMSNorm", "RoPE", "SwiGLU"), precision="bf16_true"),
    "fused, checkpointed": replace(PLAIN, fused=("RMSNorm", "RoPE", "SwiGLU"), checkpointing="full"),
    "fused, lora": replace(LORA, fused=("RMSNorm", "RoPE", "SwiGLU")),
}


@pytest.mark.slow
@pytest.mark.parametrize("setup_name", FAMILY_SETUPS)
@pytest.mark.parametrize("architecture", FIELDS)
def test_families_keep_and_reach_what_is_predicted(architecture, setup_name):
    setup = FAMILY_SETUPS[setup_name]
    if architecture in EAGER_ONLY:
        setup = replace(setup, attention="eager")
    saved, peak = real_bytes(architecture, setup)
    said = predicted(architecture, setup)
    assert said.saved_bytes == pytest.approx(saved, rel=0.015)
    assert said.peak_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_family_keep_and_reach_what_is_predicted(variant, checkpointing):
    architecture, fields = VARIANTS[variant]
    setup = replace(PLAIN, checkpointing=checkpointing, precision="bf16")
    saved, peak = real_bytes(architecture, setup, **fields)
    said = predicted(architecture, setup, **fields)
    assert said.saved_bytes == pytest.approx(saved, rel=0.015)
    assert said.peak_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(("architecture", "fields"), DROPOUTS)
def test_masks_of_dropout_are_counted(architecture, fields, checkpointing):
    setup = replace(PLAIN, attention="eager", checkpointing=checkpointing)
    saved, peak = real_bytes(architecture, setup, **fields)
    said = predicted(architecture, setup, **fields)
    assert said.saved_bytes == pytest.approx(saved, rel=0.015)
    assert said.peak_bytes == pytest.approx(peak, rel=0.02)
    if checkpointing == "none":
        assert saved > 1.05 * real_bytes(architecture, setup)[0]


@pytest.mark.slow
@pytest.mark.parametrize("setup_name", LLAMA_SETUPS)
def test_setups_keep_and_reach_what_is_predicted(setup_name):
    setup = LLAMA_SETUPS[setup_name]
    saved, peak = real_bytes("llama", setup)
    said = predicted("llama", setup)
    assert said.saved_bytes == pytest.approx(saved, rel=0.015)
    assert said.peak_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16_true"])
def test_compiled_layers_keep_what_layers_with_fused_norms_and_gates_keep(precision):
    setup = replace(PLAIN, precision=precision, attention="sdpa")
    config = CONFIG_MAPPING["llama"](**FIELDS["llama"])
    kept = []
    for compiles in (False, True):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if precision == "bf16_true" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for layer in model.model.layers if compiles else ():
            layer.compile()
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: dict[int, torch.Tensor] = {}

        def keep(tensor, weights=weights, saved=saved):
            if (memory := tensor.untyped_storage().data_ptr()) not in weights:
                saved[memory] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model(input_ids=real_inputs(setup)["input_ids"], use_cache=False)
        kept.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))
    said = [predicted("llama", replace(setup, compile=compiles)).saved_bytes for compiles in (False, True)]
    # The head and its loss are in the prediction only, and equal in both.
    assert kept[0] - kept[1] == pytest.approx(said[0] - said[1], rel=0.1)
    assert kept[1] < 0.8 * kept[0]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_fused_layers_of_gemma_keep_and_reach_what_is_predicted(checkpointing):
    setup = replace(PLAIN, fused=("RMSNorm", "RoPE", "GEGLU"), checkpointing=checkpointing, attention="eager")
    saved, peak = real_bytes("gemma2", setup)
    said = predicted("gemma2", setup)
    assert said.saved_bytes == pytest.approx(saved, rel=0.015)
    assert said.peak_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("setup_name", LONG_SETUPS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_neox", "falcon", "qwen3_moe"])
def test_tiles_keep_and_reach_what_is_predicted(architecture, setup_name):
    setup, fields = LONG_SETUPS[setup_name], {"intermediate_size": 512, "num_hidden_layers": 4}
    saved, peak = real_bytes(architecture, setup, **fields)
    said = predicted(architecture, setup, **fields)
    assert said.saved_bytes == pytest.approx(saved, rel=0.015)
    assert said.peak_bytes == pytest.approx(peak, rel=0.03)
    plain = predicted(architecture, replace(setup, long_rows=False), **fields)
    assert said.peak_bytes < (0.8 if architecture == "llama" else 1.01) * plain.peak_bytes


@pytest.mark.slow
def test_packed_rows_without_a_mask_within_the_padding_of_their_buckets():
    # A plan cannot know how documents fall into buckets, so it takes the mean over many.
    saved, peak = real_bytes("llama", replace(PLAIN, packing=True))
    said = predicted("llama", replace(PLAIN, packing=True))
    assert said.saved_bytes == pytest.approx(saved, rel=0.03)
    assert said.peak_bytes == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective", "segments_5"])
def test_a_few_walked_layers_say_what_all_would(architecture, checkpointing):
    fields = {**FIELDS[architecture]} | ({"n_layer": 24} if architecture == "gpt2" else {"num_hidden_layers": 24})
    facts = facts_from_config(CONFIG_MAPPING[architecture](**fields).to_dict(), name=architecture)
    setup = replace(PLAIN, checkpointing=checkpointing, precision="bf16")
    few, every = step_bytes(facts, setup), _walk(facts, setup, True, False, None)
    assert few.saved_bytes == pytest.approx(every.saved_bytes, rel=1e-9)
    assert few.gradient_bytes == pytest.approx(every.gradient_bytes, rel=1e-9)
    # Where kinds of layers alternate, the kind that comes last moves the peak by one layer's temporaries.
    assert few.peak_bytes == pytest.approx(every.peak_bytes, rel=1e-9 if len(facts.layers) == 1 else 0.02)


def test_segments_are_as_long_as_the_root_of_the_number_of_layers():
    facts = load_model_facts("meta-llama/Llama-3.1-8B")
    kept = {name: step_bytes(facts, replace(PLAIN, checkpointing=name)) for name in ("segments", "segments_6", "full")}
    assert kept["segments"] == kept["segments_6"]
    # 6 of the 32 layers keep an input: 26 inputs fewer than with full checkpointing.
    less = kept["full"].saved_bytes - kept["segments"].saved_bytes
    assert less == 26 * PLAIN.micro_batch_size * PLAIN.sequence_length * facts.hidden_size * 4


def test_full_checkpointing_keeps_one_input_per_layer():
    # 2·L·s·b·h bytes in 16 bit: 32 layers, hidden size 4096.
    facts, setup = load_model_facts("meta-llama/Llama-3.1-8B"), replace(PLAIN, precision="bf16_true", loss="chunked")
    long = replace(setup, checkpointing="full", attention="flash_attention_2", sequence_length=8192)
    longer = replace(long, sequence_length=16384)
    added = step_bytes(facts, longer).saved_bytes - step_bytes(facts, long).saved_bytes
    per_layer = 2 * 2 * 8192 * 4096
    # On top of the 32 inputs come the last hidden states, their gradients and those of the final norm.
    assert added == pytest.approx(32 * per_layer, rel=0.2)
    assert added > 32 * per_layer


def test_unknown_architectures_and_policies_are_refused():
    facts = load_model_facts("meta-llama/Llama-3.1-8B")
    with pytest.raises(ConfigError, match="'mamba' models are not modelled"):
        step_bytes(replace(facts, model_type="mamba"), PLAIN)
    with pytest.raises(ConfigError, match="not a checkpointing policy"):
        step_bytes(facts, replace(PLAIN, checkpointing="evry_2"))
    with pytest.raises(ConfigError, match="caps its attention scores"):
        step_bytes(load_model_facts("google/gemma-2-2b"), PLAIN)
    with pytest.raises(ConfigError, match=r"no sdpa attention. Fix: use eager or flash_attention_2\."):
        step_bytes(load_model_facts("EleutherAI/gpt-j-6b"), PLAIN)
    with pytest.raises(ConfigError, match="lets packed documents see each other"):
        step_bytes(load_model_facts("tiiuae/falcon-7b"), replace(PLAIN, packing=True))
    sparse = replace(PLAIN, attention="eager", checkpointing="selective")
    with pytest.raises(ConfigError, match="in place that selective checkpointing keeps"):
        step_bytes(load_model_facts("openai/gpt-oss-20b"), sparse)
    assert conflict(sparse, load_model_facts("openai/gpt-oss-20b")) is not None
    broken = facts_from_config({"model_type": "falcon", "num_ln_in_parallel_attn": 2}, name="falcon")
    with pytest.raises(ConfigError, match="two norms"):
        step_bytes(broken, PLAIN)


facts_drawn = st.sampled_from(
    ["meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B", "openai-community/gpt2", "microsoft/phi-2"]
)
setups_drawn = st.builds(
    TrainingSetup,
    method=st.sampled_from(["full", "lora", "qlora"]),
    precision=st.sampled_from(["fp32", "bf16", "bf16_true"]),
    checkpointing=st.sampled_from(["none", "full", "every_2", "selective", "offload"]),
    attention=st.sampled_from(["eager", "sdpa", "flash_attention_2"]),
    loss=st.sampled_from(["full", "chunked"]),
    micro_batch_size=st.integers(1, 4),
    sequence_length=st.sampled_from([256, 1000, 2048]),
    packing=st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(facts_drawn, setups_drawn, st.booleans())
@example(
    "Qwen/Qwen3-0.6B", TrainingSetup(precision="bf16", checkpointing="full", loss="chunked", packing=False), False
)
def test_more_tokens_never_need_less(name, setup, more_rows):
    facts = load_model_facts(name)
    grown = {"micro_batch_size": setup.micro_batch_size + 1} if more_rows else {"sequence_length": 2560}
    less, more = step_bytes(facts, setup), step_bytes(facts, replace(setup, **grown))
    assert more.saved_bytes > less.saved_bytes
    # When the chunked loss goes from one chunk to two, it saves a cast of the head's gradient.
    cast = 4 * facts.vocab_size * facts.hidden_size if setup.loss == "chunked" else 0
    assert more.peak_bytes >= less.peak_bytes - cast


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(facts_drawn, setups_drawn)
def test_checkpointing_never_keeps_more(name, setup):
    facts = load_model_facts(name)
    kept = [
        step_bytes(facts, replace(setup, checkpointing=policy)).saved_bytes
        for policy in ("offload", "full", "every_2", "none")
    ]
    assert kept == sorted(kept)
    assert step_bytes(facts, replace(setup, checkpointing="selective")).saved_bytes >= kept[1]


@settings(max_examples=25, deadline=None)
@given(facts_drawn, setups_drawn)
def test_an_adapter_keeps_no_more_than_training_all_weights(name, setup):
    facts, setup = load_model_facts(name), replace(setup, checkpointing="none")
    first = facts.layers[0].attention[0].name
    adapted = replace(setup, method="lora", lora=LoraSetup(rank=8, targets=(first,)))
    few, whole = step_bytes(facts, adapted), step_bytes(facts, replace(setup, method="full"))
    assert few.gradient_bytes < 0.05 * whole.gradient_bytes
    assert few.saved_bytes <= whole.saved_bytes


def test_parallel_ranks_share_activations():
    facts = load_model_facts("meta-llama/Llama-3.1-8B")
    setup = replace(PLAIN, precision="bf16_true", sequence_length=4096, attention="flash_attention_2", loss="full")
    alone = step_bytes(facts, setup)
    sequence = step_bytes(facts, replace(setup, parallel=ParallelSetup(num_gpus=4, sequence_parallel=4)))
    tensor = step_bytes(facts, replace(setup, parallel=ParallelSetup(num_gpus=4, tensor_parallel=4)))
    # A quarter of the tokens plus copies for the exchange; all of the weights.
    assert 0.25 * alone.saved_bytes < sequence.saved_bytes < 0.35 * alone.saved_bytes
    assert sequence.gradient_bytes == pytest.approx(alone.gradient_bytes)
    # Under tensor parallelism hidden states and norms stay whole; matrices are divided.
    assert 0.25 * alone.saved_bytes < tensor.saved_bytes < 0.6 * alone.saved_bytes
    assert tensor.gradient_bytes == pytest.approx(alone.gradient_bytes / 4, rel=0.01)


def test_old_bitsandbytes_keeps_the_inputs_of_this_and_the_last_micro_batch():
    facts = load_model_facts("meta-llama/Llama-2-7b-hf")
    setup = replace(LORA, method="qlora", precision="bf16_true", lora=LoraSetup(rank=8, targets=("q_proj", "v_proj")))
    now, old = (step_bytes(facts, replace(setup, keeps_quantised_inputs=keeps)) for keeps in (False, True))
    rows = setup.micro_batch_size * setup.sequence_length * 2
    # Inputs of queries, of the output, of gate and down: kept once more from the micro-batch before.
    inputs = facts.num_layers * rows * (3 * facts.hidden_size + facts.intermediate_size)
    # In this micro-batch, the MLP's inputs are kept for nothing else.
    only_kept = facts.num_layers * rows * (facts.hidden_size + facts.intermediate_size)
    assert old.saved_bytes - now.saved_bytes == pytest.approx(only_kept, rel=0.01)
    assert old.forward_bytes - now.forward_bytes == pytest.approx(inputs + only_kept, rel=0.02)
    for other in (replace(setup, method="lora"), replace(setup, checkpointing="full")):
        assert step_bytes(facts, replace(other, keeps_quantised_inputs=True)) == step_bytes(facts, other)
