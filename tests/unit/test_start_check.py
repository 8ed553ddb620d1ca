"""The start check finds what would silently train wrong, on real architectures and on deliberately broken ones."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    CONFIG_MAPPING,
    BertConfig,
    BloomConfig,
    Gemma3nTextConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    ModernBertDecoderConfig,
    PreTrainedConfig,
)
from transformers import modeling_flash_attention_utils as flash
from transformers.models.llama import modeling_llama

from accel_scale.errors import ConfigError
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
from accel_scale.modeling.attention import check_can_isolate
from accel_scale.modeling.packed_attention import PACKED_ATTENTION, register_packed_attention
from accel_scale.modeling.tiling import tiles
from accel_scale.optimization import fast_loss
from accel_scale.start_check import PlannedRun, Verdict, check_start, steps, twin_check
from accel_scale.start_check import rows as start_check_rows
from accel_scale.start_check.flash_on_cpu import _KERNEL_VARIABLES, attention_on_cpu
from accel_scale.start_check.twin import NoTwin, build_twin, undisturbed

register_packed_attention()
LLAMA = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_key_value_heads=8)
LORA = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")


def check(config: PreTrainedConfig, policy: str = "none", **changes: Any) -> Verdict:
    settings: dict[str, Any] = {"attention": "sdpa", "rows": "packed", **changes}
    return check_start(PlannedRun(config=config, policy=CheckpointingPolicy.parse(policy), **settings))


@pytest.fixture
def broken_head(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[torch.Tensor], torch.Tensor]], None]:
    """Let Llama's own forward change its logits before its loss."""

    def install(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        forward = LlamaForCausalLM.forward

        def changed(self: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            output.logits = change(output.logits)
            if labels is not None:
                output.loss = self.loss_function(output.logits, labels, self.config.vocab_size)
            return output

        monkeypatch.setattr(LlamaForCausalLM, "forward", changed)

    return install


@pytest.mark.parametrize("rows", ["packed", "padded", "lanes", "stream"])
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_a_plain_model_passes(rows: str, adapter: LoraConfig | None) -> None:
    verdict = check(LLAMA, "selective", rows=rows, adapter=adapter, attention=PACKED_ATTENTION)
    assert verdict == Verdict(PACKED_ATTENTION, skips_unlabelled=rows in ("packed", "padded"))


def test_a_model_that_runs_its_layers_several_times_computes_all_tokens() -> None:
    """The last layer's MLP feeds the first layer of the next round."""
    verdict = check(CONFIG_MAPPING["hrm_text"](), rows="packed")
    assert not verdict.skips_unlabelled
    assert not verdict.loss_from_logits


def test_it_takes_about_a_second_and_leaves_no_trace() -> None:
    check(LLAMA)
    states = torch.get_rng_state(), random.getstate()
    torch.set_default_dtype(torch.float64)
    try:
        started = time.process_time()
        check(LLAMA, "full", adapter=LORA)
        seconds = time.process_time() - started
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert seconds < 3, "of processor time; 0.5 on a quiet machine"
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.get_default_device() == torch.device("cpu")


@pytest.mark.parametrize(
    "change", [lambda x: 0.98 * x, lambda x: 50 * torch.tanh(x / 50), lambda x: x + 0.1 * x.roll(1, -1)],
    ids=["scale of 0.98", "cap at 50", "a second product"],
)  # fmt: skip
def test_a_head_that_the_recipe_does_not_know_is_found(broken_head: Any, change: Any) -> None:
    """Loss and gradients reveal it; the loss is then computed from the model's own logits."""
    broken_head(change)
    verdict = check(LLAMA)
    assert verdict.loss_from_logits
    assert "own logits" in verdict.notes[0]


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_the_log_probabilities_of_pairs_are_compared_with_the_models_own(
    broken_head: Any, adapter: LoraConfig | None
) -> None:
    """They are computed by TRL's head, which has no alternative: a head that it does not know is refused."""
    of_pairs: dict[str, Any] = {"rows": "padded", "log_probs": True, "adapter": adapter}
    assert check(LLAMA, "full", **of_pairs) == Verdict("sdpa")
    broken_head(lambda x: 0.98 * x)
    with pytest.raises(
        ConfigError, match=r"log-probabilities by TRL's head are not LlamaForCausalLM's own: .*2% apart.*train another"
    ):
        check(LLAMA, **of_pairs)


@pytest.mark.parametrize("model_type", ["gemma2", "cohere", "granite", "falcon_h1", "muse", "minicpm3", "hyperclovax"])
def test_every_name_of_a_factor_or_cap_is_the_models_own(model_type: str) -> None:
    """`head_transform` reads these names; this would detect one that moved in transformers."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {model_type}")
    factors = {
        "cohere": {"logit_scale": 0.3}, "granite": {"logits_scaling": 3.0}, "falcon_h1": {"lm_head_multiplier": 0.4},
        "gemma2": {"final_logit_softcapping": 10.0},
    }  # fmt: skip
    config = CONFIG_MAPPING[model_type](**factors.get(model_type, {}))
    assert not check(config, rows="padded", attention="eager").loss_from_logits


def test_a_loss_that_is_more_than_cross_entropy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaForCausalLM.forward

    def with_penalty(self: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = forward(self, *args, labels=labels, **kwargs)
        if labels is not None:
            output.loss = output.loss + 1e-3 * output.logits.float().logsumexp(-1).pow(2).mean()
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", with_penalty)
    with pytest.raises(ConfigError, match=r"loss is not LlamaForCausalLM's own: loss .* against"):
        check(LLAMA)


@pytest.mark.parametrize(
    ("leak", "rows", "message"),
    [
        (lambda x: x + 0.01 * x.roll(-1, 1), "padded", "is not causal"),
        (lambda x: x + 0.01 * x.roll(1, 1), "packed", "lets packed documents see each other"),
        (lambda x: x + 0.01 * x.roll(1, 1), "lanes", "lets packed documents see each other"),
        (lambda x: x + 0.01 * x.roll(1, 0), "padded", "lets the rows of a micro-batch see each other"),
        (lambda x: x + 0.01 * x.roll(1, 0), "lanes", "lets packed documents see each other"),
    ],
    ids=["a token sees the next one", "a state", "a state between lanes", "rows", "rows of lanes"],
)
def test_whoever_sees_what_it_must_not_is_found(
    monkeypatch: pytest.MonkeyPatch, leak: Any, rows: str, message: str
) -> None:
    forward = modeling_llama.LlamaDecoderLayer.forward

    def leaking(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = forward(self, leak(hidden), *args, **kwargs)
        return result

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", leaking)
    with pytest.raises(ConfigError, match=message):
        check(LLAMA, rows=rows)


@pytest.mark.parametrize("policy", ["full", "every_2", "selective", "segments", "offload"])
def test_recomputation_that_is_not_the_same_is_found(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """A block whose result is different by 1% when the backward pass recomputes it."""
    forward = modeling_llama.LlamaMLP.forward

    def inexact(self: Any, x: torch.Tensor) -> torch.Tensor:
        is_recomputed = torch._C._current_graph_task_id() != -1
        result: torch.Tensor = forward(self, x * (1.01 if is_recomputed else 1.0))
        return result

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", inexact)
    with pytest.raises(ConfigError, match=f"policy {policy} does not leave .* gradients .* Fix: use none"):
        check(LLAMA, policy)


def test_tiles_whose_gradients_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config, policy = LLAMA, CheckpointingPolicy("full", in_tiles=True)
    run = PlannedRun(config=config, attention="eager", rows="padded", policy=policy)
    assert check_start(run).notes == ()
    whole = tiles._backward_in_tiles

    def forgets_a_tile(call: Any, x: torch.Tensor, grad: torch.Tensor, needs_x: bool) -> Any:
        return whole(call, x, grad * (torch.arange(grad.shape[-2]) >= 3).unsqueeze(-1), needs_x)

    monkeypatch.setattr(tiles, "_backward_in_tiles", forgets_a_tile)
    with pytest.raises(ConfigError, match="in tiles does not leave its gradients as they are"):
        check_start(run)


def test_experts_that_stay_whole_under_long_rows_are_named() -> None:
    config = MixtralConfig()
    policy = CheckpointingPolicy("full", in_tiles=True)
    (note,) = check_start(PlannedRun(config=config, attention="eager", rows="padded", policy=policy)).notes
    assert "computes experts whole" in note


def test_weights_that_never_train_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    verdict = check(LLAMA)
    assert len(verdict.untrained) == 2
    assert "gate_proj" in verdict.untrained[0]
    assert verdict.notes[0].startswith("2 weights get no gradient")
    assert check(LLAMA, adapter=LORA).exclude_modules == ("gate_proj",)
    named = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "gate_proj"])
    with pytest.raises(ConfigError, match=r"adapters on gate_proj would never train.*leave out gate_proj"):
        check(LLAMA, adapter=named, targets_given=True)


def test_the_first_factor_of_a_fresh_adapter_counts_as_trained() -> None:
    """LoRA's B starts at zero, so A has no gradient in its first step; the twin's B is therefore not zero."""
    assert check(LLAMA, adapter=LORA).untrained == ()


def test_an_encoder_is_told_to_decode() -> None:
    with pytest.raises(ConfigError, match=r'not causal.*"is_decoder": true'):
        check(BertConfig(), rows="padded")
    assert check(BertConfig(is_decoder=True), rows="padded").loss_from_logits, "its head is several layers"
    assert check(ModernBertDecoderConfig(), rows="padded").loss_from_logits


def test_attention_that_forgets_the_borders_is_refused() -> None:
    for config in (BloomConfig(), GptOssConfig()):
        with pytest.raises(ConfigError, match=r"see each other with eager.*--packing false") as caught:
            check(config, attention="eager")
        assert caught.value.place == "--packing"
    with pytest.raises(ConfigError, match="--isolate_documents false"):
        check(BloomConfig(), attention="eager", rows="lanes", packing_flag="--isolate_documents false")


@pytest.mark.parametrize("rows", ["packed", "lanes"])
def test_documents_that_the_loader_knows_are_checked_as_they_are_trained(
    monkeypatch: pytest.MonkeyPatch, rows: str
) -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4)
    run = {"attention": register_packed_attention(), "rows": rows}
    check(config, **run)
    # As when the mask is marked and a model that reshapes it loses the mark.
    monkeypatch.setattr("accel_scale.modeling.packed_mask._facts_of", lambda mask: None)
    with pytest.raises(ConfigError, match="the recipe's loss is not GPT2LMHeadModel's own"):
        check(config, **run)


def test_flash_attention_is_judged_by_what_it_is_given() -> None:
    """No kernel is needed: gpt-oss ignores the positions in its mask, but flash attention gets the lengths."""
    assert check(GptOssConfig(), attention="flash_attention_2").attention == "flash_attention_2"
    assert check(LLAMA, attention="flash_attention_3").attention == "flash_attention_3"
    assert check(LLAMA, attention="kernels-community/vllm-flash-attn3").notes == ()


def test_flash_attention_gets_the_documents_of_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers derives them from the positions of a single row; a plain loop's micro-batch has more rows."""
    assert check(LLAMA, attention="flash_attention_2", rows="lanes").attention == "flash_attention_2"
    for module in (fast_loss, start_check_rows):
        monkeypatch.setattr(module, "with_document_lengths", lambda inputs, attention: inputs)
    with pytest.raises(ConfigError, match="see each other with flash_attention_2"):
        check(LLAMA, attention="flash_attention_2", rows="lanes", attention_given=True)


def test_flash_on_the_cpu_computes_attention() -> None:
    """Packed, windowed and grouped: the logits match eager attention with its mask."""
    config = CONFIG_MAPPING["mistral"](sliding_window=6)
    ids = torch.randint(8, 512, (1, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(14), torch.arange(10)])[None]
    logits = []
    with undisturbed(), torch.no_grad():
        for name in ("eager", "flash_attention_2"):
            with attention_on_cpu(name) as attention:
                model = build_twin(config, attention=attention.built_with).eval()
                model.config.sliding_window = 6
                attention.switch_on(model)
                logits.append(model(ids, position_ids=positions, use_cache=False).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_transformers_keeps_its_flash_kernel_where_the_check_puts_another() -> None:
    before = {name: getattr(flash, name) for name in _KERNEL_VARIABLES}
    with attention_on_cpu("flash_attention_2"):
        functions, _ = flash.lazy_import_flash_attention("flash_attention_2")
        assert functions[1] is flash._flash_varlen_fn
    assert {name: getattr(flash, name) for name in _KERNEL_VARIABLES} == before


@pytest.mark.slow
def test_selective_checkpointing_of_a_model_that_writes_in_place() -> None:
    with pytest.raises(ConfigError, match=r"selective does not leave Gemma3n.*Fix: use full"):
        check(Gemma3nTextConfig(), "selective")
    with pytest.raises(ConfigError, match=r"selective does not leave GptOss.*Fix: use full"):
        check(GptOssConfig(), "selective", attention="eager", rows="padded")


@pytest.mark.slow
def test_a_module_whose_weight_is_used_without_a_call_gets_no_adapter() -> None:
    targets = ["q_proj", "dt_proj", "x_proj"]
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=targets)
    assert check(JambaConfig(), adapter=adapter, rows="padded").exclude_modules == ("dt_proj",)


def test_another_attention_is_taken_where_nobody_asked_for_this_one() -> None:
    """DeepSeek's indexer reads the mask, which `sdpa_packed` omits if rows are not packed."""
    config = CONFIG_MAPPING["deepseek_v32"]()
    verdict = check(config, attention=PACKED_ATTENTION, rows="padded")
    assert verdict.attention == "sdpa"
    assert "cannot take a step with sdpa_packed" in verdict.notes[0]
    with pytest.raises(ConfigError, match="Fix: use --attn_implementation sdpa"):
        check(config, attention=PACKED_ATTENTION, rows="padded", attention_given=True)


def test_what_cannot_be_shrunk_is_said_and_not_refused() -> None:
    config = CONFIG_MAPPING["roc_bert"](is_decoder=True, shape_vocab_size=10**9)
    verdict = check(config, rows="padded")
    assert "start check: skipped" in verdict.notes[0]
    with undisturbed(), pytest.raises(NoTwin, match="parameters after shrinking"):
        build_twin(config, attention="eager")


def test_the_routers_loss_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mixtures = [CONFIG_MAPPING[name]() for name in ("mixtral", "granitemoe")]
    for config in mixtures:
        assert check(config, rows="padded", router_loss=0.02).notes == ()
    for module in (twin_check, steps):
        monkeypatch.setattr(module, "router_coefficient", lambda config: 0.01)
    with pytest.raises(ConfigError, match=r"--router_aux_loss_coef: .*auxiliary loss is not Mixtral.*Fix: use 0"):
        check(mixtures[0], rows="padded", router_loss=0.02)


def test_a_page_of_messages_does_not_name_another_recipes_flags() -> None:
    """The caller says which flag disables packing."""
    with pytest.raises(ConfigError, match="--isolate_documents false") as caught:
        check(CONFIG_MAPPING["opt"](), rows="lanes", packing_flag="--isolate_documents false")
    assert caught.value.place == "--isolate_documents"
    with pytest.raises(ConfigError) as caught:
        check_can_isolate(JambaConfig(), "--isolate_documents false")
    assert caught.value.place == "--isolate_documents"
    assert caught.value.fix is not None
    assert "--isolate_documents false" in caught.value.fix
