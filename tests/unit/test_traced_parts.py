"""Parts of a trace, each with numbers: own logits, masks as indices, loops over tokens, caches, forward passes."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_scale.errors import ConfigError, NotRunError
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import facts_of_any
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.api import plan
from accel_scale.planning.traced.fits import _known
from accel_scale.planning.traced.forward import forward_bytes
from accel_scale.planning.traced.kept import KeptLayer
from accel_scale.planning.traced.polynomials import value_of
from accel_scale.planning.traced.steps import step_bytes
from accel_scale.tracing import service
from accel_scale.tracing.cache import _fitted, read_cache
from accel_scale.tracing.cuda_kernels import CudaKernels
from accel_scale.tracing.fits import fit_segments
from accel_scale.tracing.head_operations import HeadOperations
from accel_scale.tracing.recording import Recorder
from accel_scale.tracing.skeletons import Skeleton, _decoder_layers
from accel_scale.tracing.step import FakeStep

FP32 = TrainingSetup(precision="fp32", packing=False, checkpointing="none", micro_batch_size=2, sequence_length=64)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 512}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODERN = {**SIZES, **SPECIAL, "cls_token_id": 1, "sep_token_id": 2}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(model_type: str, num_layers: int = 2, **fields: object) -> dict[str, object]:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, num_hidden_layers=num_layers, **{**SIZES, **SPECIAL, **fields})
    return json.loads(json.dumps(config.to_dict(), default=str))


def small(model_type: str, **fields: object) -> ModelFacts:
    return facts_of_any(config_of(model_type, **fields), name=model_type)  # type: ignore[arg-type]


# ── Own logits ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cap", "factor", "operations", "is_own"),
    [
        (None, 1.0, lambda x: x @ x.T, False),
        (None, 1.0, lambda x: torch.nn.functional.linear(x, x, x[0, 0]).float()[None], False),
        (None, 1.0, lambda x: (x @ x.T) * 1.0, False),
        (None, 1.0, lambda x: (x @ x.T) * 0.5, True),
        (None, 0.5, lambda x: (x @ x.T) * 0.5, False),
        (None, 0.5, lambda x: torch.tanh(x @ x.T) * 0.5, True),
        (30.0, 1.0, lambda x: torch.tanh((x @ x.T) / 30.0) * 30.0, False),
        (None, 1.0, lambda x: torch.nn.functional.gelu(x) @ x.T, True),
        (30.0, 0.5, lambda x: torch.nn.functional.layer_norm(x, (4,)) @ x.T, True),
    ],
)
def test_a_head_is_own_where_it_does_more_than_the_configuration_states(cap, factor, operations, is_own) -> None:
    x = torch.ones(4, 4)
    with HeadOperations((cap, factor)) as head:
        torch.nn.functional.gelu(x)  # part of the layers
        head.begin()
        operations(x)
    assert head.is_own is is_own


def test_the_loss_of_own_logits_is_taken_from_whole_logits() -> None:
    """ModernBERT's decoder has a dense layer and a norm before the product. Logits of 2 × 64 tokens and 512 words."""
    step = FakeStep(small("modernbert-decoder", **MODERN), FP32, is_cuda=False, is_tracked=True)
    plain = FakeStep(small("ernie4_5", num_key_value_heads=2, head_dim=16), FP32, is_cuda=False, is_tracked=True)
    assert (step.takes_logits, plain.takes_logits) == (True, False)
    logits, states = 2 * 64 * 512 * 4, 2 * 64 * 64 * 4
    ends = [max(size for size, _ in one._record(2, 64)["finish"]) for one in (step, plain)]
    assert ends == [logits, states]


def test_what_layers_hold_is_as_wide_as_their_states_and_not_as_the_logits() -> None:
    """Under bf16 autocast, states are fp32 and logits bf16; the inputs of all layers but one are offloaded."""
    facts = small("modernbert-decoder", num_layers=4, **MODERN)
    setup = replace(FP32, precision="bf16")
    here, away = (step_bytes(facts, replace(setup, checkpointing=name), is_cuda=False) for name in ("full", "offload"))
    assert here.saved_bytes - away.saved_bytes == 3 * 2 * 64 * 64 * 4


def test_layers_are_the_language_models_beside_a_larger_tower() -> None:
    from transformers import AutoModelForImageTextToText, LlavaConfig

    text = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16,
            "num_attention_heads": 2, "vocab_size": 40}  # fmt: skip
    tower = {"model_type": "clip_vision_model", "num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 64,
             "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = LlavaConfig(text_config=text, vision_config=tower, image_token_index=30)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    found = _decoder_layers(model)
    assert found is not None
    assert [type(layer).__name__ for layer in found] == ["LlamaDecoderLayer"] * 2


def test_attention_keeps_a_sum_for_each_row_where_values_have_another_width() -> None:
    """As in CUDA's kernels: queries, keys, values, the result, and one fp32 number for each row of each head."""
    kept: list[tuple[tuple[int, ...], torch.dtype]] = []
    query, key = (torch.ones(2, 3, 5, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    value = torch.ones(2, 3, 5, 4, dtype=torch.bfloat16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append((tuple(tensor.shape), tensor.dtype)), lambda nothing: query
    )
    with hooks, CudaKernels():
        result = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    wide, narrow = ((2, 3, 5, 8), torch.bfloat16), ((2, 3, 5, 4), torch.bfloat16)
    assert tuple(result.shape) == narrow[0]
    assert kept == [wide, wide, narrow, narrow, ((2, 3, 5), torch.float32)]


def test_a_model_of_few_layers_has_a_configuration_of_as_many() -> None:
    """Lists with one entry per layer are shortened too; lists of other lengths are not."""
    layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    config = SimpleNamespace(num_hidden_layers=4, n_layer=5, layer_types=list("abcd"), dims=[1, 2], heads=4)
    inner, model = nn.Module(), nn.Module()
    inner.layers, inner.config, model.inner = layers, config, inner
    kept = [layers[1], layers[3]]
    Skeleton(cast(Any, model), layers).keep([1, 3])
    assert list(layers) == kept
    assert vars(config) == {
        "num_hidden_layers": 2,
        "n_layer": 5,
        "layer_types": ["b", "d"],
        "dims": [1, 2],
        "heads": 4,
    }


# ── Masks as indices ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("num_experts", "size", "found"),
    [(1, 128, 128), (8, 128, 16), (8, 8, 8), (8, 9, 8), (8, 10, 1), (200, 1000, 5)],
)
def test_a_mask_stands_for_as_many_places_as_are_true(num_experts: int, size: int, found: int) -> None:
    """Rows of 3 fp32 values: an expert's mask takes its share, a mask with one entry per expert takes all of them."""
    with (
        FakeTensorMode() as mode,
        Recorder(mode, adds_in_place=True, is_padded=False, num_experts=num_experts) as recorder,
    ):
        rows, mask = torch.empty(size, 3), torch.empty(size, dtype=torch.bool)
        taken = rows[mask]
        rows[mask] = torch.empty(found, 3)
        assert rows[None][mask[None]].shape == (found, 3)
    assert taken.shape == (found, 3)
    assert found * 3 * 4 in [bytes_ for bytes_, _ in recorder.segments["embed"]]


# ── Loops over tokens ────────────────────────────────────────────────────────────────────────────────────────────────


class Loop:
    """A step in which every token is an operation, leaving `of(rows, length)` bytes in total."""

    chosen = (0,)

    def __init__(self, of) -> None:
        self.of, self.sizes = of, []

    def run(self, rows: int, length: int) -> dict[str, list[int]]:
        self.sizes.append((rows, length))
        total = self.of(rows, length)
        return {"forward 0": [*[total // length] * (length - 1), total - total // length * (length - 1)]}

    def forward_allocations(self, rows: int, length: int, at_most: int = sys.maxsize) -> int:
        return min(length, at_most + 1)


def found_by(step: Loop, text: str) -> tuple[dict, bool]:
    facts = replace(facts_from_config({"model_type": "llama", **SIZES}, name="it"), traced_config=text)
    many, one, exact = fit_segments(cast(FakeStep, step), facts, FP32, False)
    assert one is None or exact
    return many, exact


def net(found: dict, rows: int, length: int) -> float:
    return value_of(found["forward 0"]["net"], rows, length)


def test_a_loop_over_tokens_is_run_for_few_of_them() -> None:
    step = Loop(lambda rows, length: rows * length * (40 + length))
    found, exact = found_by(step, '{"is": "curved"}')
    assert not exact
    assert max(length for _, length in step.sizes) == 128
    assert net(found, 4, 4096) == pytest.approx(4 * 4096 * (40 + 4096))


def test_where_a_curve_is_wrong_a_line_goes_on_from_the_two_longest() -> None:
    """A buffer of 80 tokens fills first: 96 and 128 tokens lie on the line, shorter lengths do not."""

    def of(rows: int, length: int) -> int:
        return rows * (1000 * length + 50 * min(length, 80) ** 2)

    step = Loop(of)
    found, exact = found_by(step, '{"is": "bent"}')
    assert not exact
    assert [net(found, rows, length) for rows, length in ((1, 96), (3, 128), (4, 4096))] == pytest.approx(
        [of(1, 96), of(3, 128), of(4, 4096)]
    )
    assert max(length for _, length in step.sizes) == 128


def test_without_a_loop_what_no_curve_meets_is_of_one_size() -> None:
    class NoLoop(Loop):
        def run(self, rows: int, length: int) -> dict[str, list[int]]:
            self.sizes.append((rows, length))
            return {"forward 0": [self.of(rows, length)]}

        def forward_allocations(self, rows: int, length: int, at_most: int = sys.maxsize) -> int:
            return 1

    step = NoLoop(lambda rows, length: rows * 2 ** (length // 64))
    found, exact = found_by(step, '{"is": "of one size"}')
    assert exact
    assert net(found, 9, 9999) == 9 * 2
    assert step.sizes[-1] == (1, 64)


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────

XLSTM = {"model_type": "xlstm", "num_hidden_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 256}


@pytest.mark.filterwarnings("ignore")
def test_a_precision_that_the_class_cannot_compute_is_refused_and_the_others_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """xLSTM's chunks mix fp32 and bf16 without autocast: the real model fails as the plan says."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**XLSTM), dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="same dtype"):
        model(input_ids=torch.zeros(1, 64, dtype=torch.long), use_cache=False)
    facts = facts_of_any(XLSTM, name="small")
    setup = replace(FP32, precision="bf16_true")
    with pytest.raises(NotRunError, match=r"'xlstm' mixes dtypes with 16-bit weights \(RuntimeError"):
        step_bytes(facts, setup)
    _known.cache_clear()  # the refusal is in the file, too
    monkeypatch.setattr("accel_scale.planning.traced.fits.tracer", None)
    with pytest.raises(NotRunError, match=r"Fix: .* another precision"):
        step_bytes(facts, setup)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    (tmp_path / "config.json").write_text(json.dumps(XLSTM), encoding="utf-8")
    found = plan(str(tmp_path), gpu="H100", method="full")
    assert {candidate.setup.precision for candidate in found.candidates} == {"bf16"}
    found = plan(str(tmp_path), gpu="H100", method="full", precision="bf16_true")
    assert not found.candidates
    assert "mixes dtypes with 16-bit weights" in found.rejections[0].reason
    with pytest.raises(NotRunError, match="16-bit"):
        plan(str(tmp_path), gpu="H100", method="full", precision="bf16_true", strategy=["FSDP2"], num_gpus=2)


@pytest.mark.filterwarnings("ignore")
def test_a_class_without_checkpointing_is_planned_without(tmp_path: Path) -> None:
    """JetMoE's, whose layers transformers does not recompute; nobody asked for that."""
    from accel_scale.reporting.plan_tables import nothing_fits

    shape = {"model_type": "jetmoe", "hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 512,
             "num_key_value_heads": 4, "kv_channels": 32, "vocab_size": 32000, "num_attention_heads": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    wish = {"method": "full", "max_length": 256, "global_batch_size": 4}
    for num_gpus in (1, 2):
        found = plan(str(tmp_path), gpu="24GiB", num_gpus=num_gpus, **wish)
        assert {candidate.setup.checkpointing for candidate in found.candidates} == {"none"}
    assert nothing_fits(plan(str(tmp_path), gpu="0.5GiB", **wish))[0].startswith("Nothing fits. Nearest: ")
    asked = {"checkpointing_policy": "full", **wish}
    with pytest.raises(NotRunError, match=r"does not support activation .* Fix: use --checkpointing_policy none"):
        plan(str(tmp_path), gpu="24GiB", **asked)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_forward_pass_that_is_ended_changes_no_later_run(share: float) -> None:
    facts = small("ernie4_5", num_key_value_heads=2, head_dim=16)
    expected = FakeStep(facts, FP32, is_cuda=False, is_tracked=True).run(2, 64)
    step = FakeStep(facts, FP32, is_cuda=False, is_tracked=True)
    num_allocations = step.forward_allocations(2, 64)
    assert 20 < num_allocations < 0.5 * sum(event > 0 for events in expected.values() for event in events)
    limit = round(share * num_allocations)
    assert step.forward_allocations(2, 64, at_most=limit) == limit + 1
    assert step.forward_allocations(2, 64, at_most=num_allocations) == num_allocations
    assert step.run(2, 64) == expected


@pytest.mark.parametrize("collects", [True, False])
def test_a_run_leaves_the_collection_of_cycles_as_it_was(collects: bool) -> None:
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        FakeStep(small("ernie4_5", num_key_value_heads=2, head_dim=16), FP32, is_cuda=False, is_tracked=True).run(1, 8)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()


# ── Caches ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        # Keys and values: 2 heads of 16 values.
        ("ernie4_5", {"num_key_value_heads": 2, "head_dim": 16}, [KeptLayer(2, None, ((0.0, 128.0), (0.0, 128.0)))]),
        ("ministral", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 32},
         [KeptLayer(2, 32, ((0.0, 128.0), (0.0, 128.0)))]),
        # A convolution over 3 tokens keeps 64 channels of each.
        ("lfm2", {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
         [KeptLayer(1, None, ((64 * 3 * 4.0, 0.0),)), KeptLayer(1, None, ((0.0, 128.0), (0.0, 128.0)))]),
    ],
)  # fmt: skip
def test_a_cache_is_read_from_the_class(model_type: str, fields: dict, expected: Sequence[KeptLayer]) -> None:
    assert read_cache(small(model_type, **fields), FP32) == expected


def test_a_cache_of_a_models_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="rwkv models keep what they know of earlier tokens elsewhere than in"):
        read_cache(small("rwkv", attention_hidden_size=64, context_length=64), FP32)


def test_sizes_that_are_no_line_are_not_fitted() -> None:
    """The third length decides, and the number of tensors must stay the same."""
    line, bent = [(None, [40 + 8 * n]) for n in (16, 32, 48)], [(None, [n * n]) for n in (16, 32, 48)]
    assert _fitted([[layer] for layer in line], (16, 32, 48)) == [KeptLayer(1, None, ((40.0, 8.0),))]
    assert _fitted([[layer] for layer in bent], (16, 32, 48)) is None
    assert _fitted([[line[0]], [line[1]], [(None, [424, 1])]], (16, 32, 48)) is None
    assert _fitted([[(8, [])]] * 3, (16, 32, 48)) == []


def test_a_prompt_lies_there_whole_until_it_is_read() -> None:
    layer = KeptLayer(1, 32, ((100.0, 0.0), (0.0, 4.0)))
    assert layer.part_bytes(2, 48, reads=True) == [200.0, 2 * 4 * 48]
    assert layer.part_bytes(2, 48) == [200.0, 2 * 4 * 32]
    assert layer.attended_bytes(2, 48) == 2 * 4 * 32


# ── Passes without gradients ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_traced_forward_pass_has_the_bytes_of_the_tape(precision: str) -> None:
    """A reference's head computes tiles of logits; weights cast for autocast stay until it ends."""
    config = config_of("qwen3", num_layers=6, num_key_value_heads=2, head_dim=16, vocab_size=4096)
    modelled, traced = facts_from_config(config, name="by hand"), service.facts_of(config, name="traced", place="here")
    setup = replace(FP32, precision=precision, loss="log_probs", micro_batch_size=4, sequence_length=256)
    for draws in (False, True):
        expected, found = (forward_bytes(facts, setup, is_cuda=False, draws=draws) for facts in (modelled, traced))
        assert found.layers_bytes == pytest.approx(expected.layers_bytes, rel=0.01)
        assert found.head_bytes == pytest.approx(expected.head_bytes, rel=0.2 if draws else 0.01)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["helium", "apertus", "jetmoe"])
def test_a_forward_pass_without_gradients_takes_what_the_real_one_takes(model_type: str) -> None:
    """A frozen base in bf16; JetMoE's class is not recomputed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from accel_scale.measuring.storages import StorageTracker

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 2048, "head_dim": 64,
             "num_attention_heads": 4, "num_key_value_heads": 2, "kv_channels": 64, "pad_token_id": 0}  # fmt: skip
    config = AutoConfig.for_model(model_type, **shape)
    facts = facts_of_any(json.loads(json.dumps(config.to_dict(), default=str)), name=model_type)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    lora = replace(FP32.lora, targets=())
    setup = replace(FP32, method="lora", precision="bf16_true", lora=lora, micro_batch_size=4, sequence_length=512)
    input_ids = torch.zeros(4, 512, dtype=torch.long)
    with torch.no_grad(), StorageTracker() as tracker:
        model.model(input_ids=input_ids, use_cache=False)
    assert forward_bytes(facts, setup, is_cuda=False, draws=True).layers_bytes == pytest.approx(
        tracker.peak_bytes, rel=0.001
    )
