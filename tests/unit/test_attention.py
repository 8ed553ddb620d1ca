"""Attention chosen for a run, isolation of packed documents, and `sdpa_packed` against masked SDPA."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CONFIG_MAPPING,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
)

from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU, Device
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.attention import (
    check_can_isolate,
    check_packing_strategy,
    resolve_attention,
)
from accel_scale.modeling.packed_attention import PACKED_ATTENTION, register_packed_attention
from accel_scale.modeling.packed_mask import bucket_lengths, dense_mask, packed_layout, packed_mask

register_packed_attention()
VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "use_cache": False,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, num_key_value_heads=2)),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SHAPE)),
    "mistral_window": (MistralForCausalLM, MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=7)),
    "qwen3_mixed": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **SHAPE,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=9,
            use_sliding_window=True,
            layer_types=["full_attention", "sliding_attention"],
        ),
    ),
}


def tiny(family: str, attention: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model_class, config = FAMILIES[family]
    config._attn_implementation = attention
    return model_class(config).to(dtype).train()


def packed_rows() -> dict[str, torch.Tensor]:
    """Two rows of 96 tokens: documents of 40, 1, 25, 30 and of 7, 80, 9 tokens."""
    lengths = [[40, 1, 25, 30], [7, 80, 9]]
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = torch.randint(1, VOCAB, (2, 96), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": position_ids}


def token_losses(model: nn.Module, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(**rows).logits.float()
    labels = rows["input_ids"][:, 1:]
    return nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")


# ------------------------------------------------------------------------------------------------------- isolation


@pytest.mark.parametrize(
    "attention",
    ["eager", "sdpa", PACKED_ATTENTION, pytest.param("flex_attention", marks=pytest.mark.slow)],
)
def test_a_document_does_not_change_its_neighbours_loss(attention):
    model, rows = tiny("llama", attention), packed_rows()
    changed = {**rows, "input_ids": rows["input_ids"].clone()}
    changed["input_ids"][0, 41:66] = rows["input_ids"][0, 41:66] % (VOCAB - 1) + 1
    changed["input_ids"][1, :7] = rows["input_ids"][1, :7] % (VOCAB - 1) + 1
    with torch.no_grad():  # flex_attention has no backward pass on a CPU
        difference = (token_losses(model, changed) - token_losses(model, rows)).abs()
    # The loss at position i is for token i + 1, so a changed document affects the losses from its predecessor's last
    # position, which predicts its first token, up to its own second-to-last one.
    neighbours = torch.ones_like(difference, dtype=torch.bool)
    neighbours[0, 40:66] = neighbours[1, :7] = False
    assert difference[neighbours].max() == 0
    assert difference[0, 41:65].max() > 0.01
    assert difference[1, :6].max() > 0.01


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_rows_packed_by_trl_are_isolated(strategy):
    from datasets import Dataset
    from trl.data_utils import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    documents = [list(range(1 + i, 1 + i + n)) for i, n in enumerate((5, 11, 40, 3, 13))]
    dataset = Dataset.from_dict({"input_ids": documents, "labels": documents})
    packed = pack_dataset(dataset, seq_length=32, strategy=strategy)
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([packed[i] for i in range(len(packed))])
    lengths = [n for row in packed["seq_lengths"] for n in row]
    assert torch.equal(batch["position_ids"][0], torch.cat([torch.arange(n) for n in lengths]))
    model = tiny("llama", PACKED_ATTENTION)
    model.eval()
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
        alone = [model(input_ids=ids[None]).logits[0] for ids in batch["input_ids"][0].split(lengths)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-6)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (MambaConfig(), "carry a state"),
        (Qwen3NextConfig(), "linear_attention layers"),
        (CONFIG_MAPPING["rwkv"](), "rwkv models carry a state"),  # recognised by its class alone
        (CONFIG_MAPPING["minimax"](), "linear_attention layers"),  # recognised by its layers alone
    ],
)
def test_a_state_is_read_from_a_configuration(config, layers):
    with pytest.raises(ConfigError, match=f"{layers}.* --packing false"):
        check_can_isolate(config, "--packing false")
    check_can_isolate(LlamaConfig(), "--packing false")


def test_wrapped_packing_is_refused():
    check_packing_strategy("bfd")
    check_packing_strategy("bfd_split")
    with pytest.raises(ConfigError, match="see each other"):
        check_packing_strategy("wrapped")


# ---------------------------------------------------------------------------------------- the same as masked SDPA


def outputs_and_gradients(model, rows, mask):
    model.zero_grad()
    (token_losses(model, rows) * mask).mean().backward()
    with torch.no_grad():
        logits = model(**rows).logits
    return logits, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["packed", "one_document", "right_padded", "left_padded"])
def test_packed_attention_equals_masked_sdpa(family, kind):
    rows = packed_rows()
    valid = torch.ones(2, 96, dtype=torch.bool)
    if kind != "packed":
        del rows["position_ids"]
    if kind.endswith("padded"):
        valid[0, 60:] = False
        valid = valid if kind == "right_padded" else valid.flip(1)
        rows["attention_mask"] = valid.long()
    pair = valid[:, 1:] & valid[:, :-1]
    expected = outputs_and_gradients(tiny(family, "sdpa"), rows, pair)
    actual = outputs_and_gradients(tiny(family, PACKED_ATTENTION), rows, pair)
    assert torch.allclose(actual[0][valid], expected[0][valid], atol=2e-6)
    assert torch.allclose(actual[1], expected[1], atol=1e-6)


def test_packed_attention_in_bf16_is_as_exact_as_masked_sdpa():
    rows, everywhere = packed_rows(), torch.ones(2, 95)
    exact = outputs_and_gradients(tiny("llama", "sdpa"), rows, everywhere)

    def error(attention: str) -> list[float]:
        found = outputs_and_gradients(tiny("llama", attention, torch.bfloat16), rows, everywhere)
        return [((a.float() - e).norm() / e.norm()).item() for a, e in zip(found, exact, strict=True)]

    for ours, theirs in zip(error(PACKED_ATTENTION), error("sdpa"), strict=True):
        assert ours < 0.02
        assert ours < 1.3 * theirs


@pytest.mark.parametrize("policy", ["full", "selective", "offload"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_attention_under_checkpointing(policy, dtype):
    rows, everywhere = packed_rows(), torch.ones(2, 95)
    model = tiny("qwen3_mixed", PACKED_ATTENTION, dtype)
    expected = outputs_and_gradients(model, rows, everywhere)
    apply_checkpointing(model, CheckpointingPolicy.parse(policy))
    actual = outputs_and_gradients(model, rows, everywhere)
    assert torch.equal(actual[1], expected[1])


def test_generation_with_left_padding_is_unchanged():
    ids = torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    found = []
    for attention in ("sdpa", PACKED_ATTENTION):
        model = tiny("llama", attention).eval()
        options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
        found.append(model.generate(input_ids=ids, attention_mask=mask, **options))
    assert torch.equal(*found)
    assert found[0].shape == (2, 20)


# ------------------------------------------------------------------------------------------------ layouts and masks


def test_buckets_waste_little():
    lengths = sorted(torch.randint(30, 100, (200,), generator=torch.Generator().manual_seed(3)).tolist())[::-1]
    buckets = bucket_lengths(lengths)
    assert sum(n for n, _ in buckets) == 200
    assert len(buckets) <= 6
    assert sum(n * padded for n, padded in buckets) < 1.25 * sum(lengths)
    assert bucket_lengths([1000] * 3) == [(3, 1000)]


@pytest.mark.parametrize("window", [None, 4])
def test_layout_stands_for_the_dense_mask(window):
    from transformers.masking_utils import (
        causal_mask_function,
        find_packed_sequence_indices,
        packed_sequence_compatibility_function,
        sdpa_mask,
        sliding_window_causal_mask_function,
    )

    position_ids = packed_rows()["position_ids"]
    base = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    function = packed_sequence_compatibility_function(base, position_ids, find_packed_sequence_indices(position_ids))
    arguments = {"batch_size": 2, "q_length": 96, "kv_length": 96, "mask_function": function}
    expected = sdpa_mask(**arguments, allow_is_causal_skip=False)
    carrier = packed_mask(**arguments, allow_is_causal_skip=False)
    assert torch.equal(dense_mask(carrier.packed_layout), expected)
    assert carrier.packed_layout.window == window
    slots = carrier.packed_layout.token_of_slot[carrier.packed_layout.slot_of_token]
    assert torch.equal(slots, torch.arange(2 * 96))


class OnDevice(torch.Tensor):
    """A tensor that counts operations that would wait for a device, as do all tensors computed from it."""

    waits = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        waits = function.__name__ in ("cpu", "tolist", "item", "nonzero", "__bool__", "__int__")
        cls.waits += waits
        result = super().__torch_function__(function, types, args, kwargs)
        return result.as_subclass(torch.Tensor) if function.__name__ == "cpu" else result


def test_a_packed_mask_waits_for_the_device_once(monkeypatch):
    segments = torch.tensor([[0] * 5 + [1] * 11, [0] * 16]).as_subclass(OnDevice)
    monkeypatch.setattr(OnDevice, "waits", 0)

    def function(row, head, query, key):
        return (segments[row, query] == segments[row, key]) & (query >= key) & (query - key < 6)

    layout = packed_mask(2, 16, 16, mask_function=function).packed_layout
    assert (OnDevice.waits, layout.window) == (1, 6)


class Uploads(TorchDispatchMode):
    """Counts copies to the meta device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_copy = function is torch.ops.aten._to_copy.default
        self.count += is_copy and (kwargs or {}).get("device") == torch.device("meta")
        return function(*args, **(kwargs or {}))


def test_a_packed_layout_is_uploaded_at_once():
    starts = torch.zeros(2, 16, dtype=torch.bool)
    starts[:, 0] = starts[0, 5] = True
    with Uploads() as uploads:
        layout = packed_layout(starts, None, torch.device("meta"))
        slots = [layout.token_of_slot, layout.slot_of_token, layout.padding_slots] * 2  # as a second layer asks
    assert (uploads.count, slots[1].shape) == (1, (32,))


def test_a_packed_mask_whose_layout_was_lost_is_an_error():
    """A model that copies its mask would otherwise attend to everything."""
    from accel_scale.modeling.packed_attention import packed_attention_forward

    rows = torch.randn(1, 2, 8, 4)
    with pytest.raises(RuntimeError, match="Linear copied the packed mask and lost its layout"):
        packed_attention_forward(nn.Linear(1, 1), rows, rows, rows, torch.empty(1, 8, dtype=torch.bool))


def test_a_mask_that_is_not_causal_within_documents_stays_dense():
    from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks

    image = torch.full((1, 16), -1)
    image[:, 4:8] = 0
    function = or_masks(causal_mask_function, blockwise_overlay(image))
    mask = packed_mask(1, 16, 16, mask_function=function, allow_is_causal_skip=False)
    assert mask.shape == (1, 1, 16, 16)
    assert mask[0, 0, 4, 7]


def test_a_window_longer_than_every_document_is_no_window():
    starts = torch.zeros(1, 20, dtype=torch.bool)
    starts[0, [0, 12]] = True
    assert packed_layout(starts, 12, torch.device("cpu")).window is None
    assert packed_layout(starts, 11, torch.device("cpu")).window == 11


# Processors without bf16 arithmetic spend their time in the matrix products, which both kinds of attention need.
BF16_LEAST = 2.0 if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1.5), (torch.bfloat16, BF16_LEAST)])
def test_packed_attention_is_faster_than_masked_sdpa(dtype, least):
    lengths = [40, 70, 55, 64, 91, 33, 80, 79] * 2
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.randint(1, VOCAB, position_ids.shape)

    def seconds(attention: str) -> float:
        model = tiny("llama", attention, dtype)
        found = []
        for _ in range(4):
            begin = time.process_time()
            model.model(input_ids=ids, position_ids=position_ids).last_hidden_state.float().mean().backward()
            found.append(time.process_time() - begin)
        return min(found)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratio = seconds("sdpa") / seconds(PACKED_ATTENTION)
    finally:
        torch.set_num_threads(threads)
    assert ratio > least


# ------------------------------------------------------------------------------------------------------ resolution


GPU = Device("cuda", "H100", capability=(9, 0))  # nothing installed


def resolve(requested, **overrides):
    settings = {
        "device": CPU,
        "dtype": torch.bfloat16,
        "packing": False,
        "model_config": FAMILIES["llama"][1],
    }
    return resolve_attention(requested, **{**settings, **overrides})


@pytest.mark.parametrize(
    ("requested", "settings", "expected"),
    [
        (None, {}, PACKED_ATTENTION),
        (None, {"packing": True}, PACKED_ATTENTION),
        (None, {"device": GPU, "packing": True}, PACKED_ATTENTION),
        (None, {"device": GPU}, "sdpa"),
        (None, {"model_config": BloomConfig()}, "eager"),
        (None, {"model_config": Gemma2Config()}, "eager"),
        ("eager", {"packing": True}, "eager"),
        ("sdpa", {"packing": True}, "sdpa"),
        (PACKED_ATTENTION, {}, PACKED_ATTENTION),
        ("flex_attention", {"device": GPU}, "flex_attention"),
    ],
)
def test_resolution(requested, settings, expected):
    assert resolve(requested, **settings) == expected


@pytest.mark.parametrize(
    ("requested", "settings", "message"),
    [
        ("sdap", {}, "did you mean sdpa"),
        ("flash_attention_2", {}, "needs a CUDA device"),
        ("flash_attention_3", {"device": GPU, "dtype": torch.float32}, "fp16 or bf16 and this run in float32"),
        (
            "flash_attention_2",
            {"device": GPU, "model_config": BloomConfig()},
            ": BloomForCausalLM does not support flash",
        ),
        (
            "flash_attention_2",
            {"device": GPU, "model_config": LlamaConfig(hidden_size=2048, num_attention_heads=4)},
            "this model has 512",
        ),
        ("flex_attention", {}, "no backward pass on a CPU"),
        ("flex_attention", {"device": GPU, "model_config": BloomConfig()}, "does not support flex"),
        ("sdpa", {"model_config": BloomConfig()}, ": BloomForCausalLM has no SDPA"),
        ("sdpa", {"model_config": Gemma2Config()}, "caps its attention logits"),
        (PACKED_ATTENTION, {"model_config": FalconConfig()}, "attention interface"),
        ("kernels-community/flash-attn2", {}, "this run is on a CPU"),
    ],
)
def test_what_cannot_be_honoured_is_refused(requested, settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(requested, **settings)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
def test_not_installed_says_how_to_get_it(name):
    with pytest.raises(ConfigError, match=r"is not installed\. Fix: (pip install|build)"):
        resolve(name, device=GPU)
