"""Adapters with default flags on mixtures of experts and state-space models: train, reload, merge."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from trl import ModelConfig

from accel_scale.errors import ConfigError
from accel_scale.merging.adapter import merge_adapter
from accel_scale.modeling.adapter_targets import exclusion
from accel_scale.modeling.adapters import lora_config
from accel_scale.modeling.loading import skeleton_of

IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
DENSE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SPARSE = {**DENSE, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = {
    **SPARSE, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2}
EXPERTS = {"down_proj", "gate_up_proj", "gate.weight"}
# Configuration, weights that are adapted in place, and linear layers that get no adapter.
FAMILIES = {
    "mixtral": ({**DENSE, "num_local_experts": 3}, EXPERTS, set()),
    "minimax": ({**DENSE, "num_local_experts": 3, "block_size": 4, "head_dim": 8}, EXPERTS, set()),
    "qwen3_moe": ({**SPARSE, "head_dim": 8}, EXPERTS, set()),
    "olmoe": (SPARSE, EXPERTS, set()),
    "deepseek_v3": (LATENT, EXPERTS, set()),
    "deepseek_v32": ({**LATENT, **INDEXER}, EXPERTS, {"wk", "wq_b", "weights_proj"}),
    "glm4_moe": ({**LATENT, "num_key_value_heads": 2, "head_dim": 8}, EXPERTS, set()),
    "ernie4_5_moe": ({**DENSE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 20}, EXPERTS, set()),
    "phimoe": ({**DENSE, "num_local_experts": 3}, set(), {"router"}),
    "llama4_text": (
        {**DENSE, "num_local_experts": 3, "intermediate_size_mlp": 48, "head_dim": 8, "moe_layers": [1]},
        set(),
        {"router"},
    ),
    "mamba": ({**DENSE, "state_size": 4}, set(), {"out_proj", "dt_proj", "x_proj"}),
    "mamba2": ({**DENSE, "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8}, set(), {"out_proj"}),
    "bamba": ({**DENSE, **MAMBA, "attn_layer_indices": [1]}, set(), {"out_proj"}),
    "jamba": ({**DENSE, "num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2}, set(), {"dt_proj"}),
    "falcon_h1": (
        {**DENSE, **MAMBA, "mamba_d_ssm": 64, "mamba_chunk_size": 8, "head_dim": 8},
        set(),
        {"out_proj"},
    ),
}


def config_of(family: str):
    return CONFIG_MAPPING[family](**FAMILIES[family][0])


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_default_adapters_train_reload_and_merge(tmp_path, family):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = logits(base)
    config = lora_config(ModelConfig(lora_r=4), skeleton_of(base.config), dropout_is_set=False)
    assert set(config.target_parameters or ()) <= FAMILIES[family][1]
    model = get_peft_model(base, config).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # in the first step only B gets a gradient
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
    idle = [name for name, p in model.named_parameters() if p.requires_grad and not p.grad.any()]
    assert not idle
    adapted = {name.split(".lora_A")[0].removesuffix(".base_layer") for name, _ in model.named_parameters()}
    assert not {name.rpartition(".")[2] for name in adapted} & FAMILIES[family][2]
    wrapped = {m.parameter_name for m in model.modules() if type(m).__name__ == "ParamWrapper"}
    assert wrapped == {name.rpartition(".")[2] for name in FAMILIES[family][1]}
    trained = logits(model)
    assert (trained - before).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "adapter")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(again), trained, rtol=1e-5, atol=1e-5)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", max_shard_size="20KB", check=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), trained, rtol=1e-4, atol=1e-4)


def test_default_dropout_gives_way_to_experts_and_a_chosen_one_is_refused():
    skeleton = skeleton_of(config_of("mixtral"))
    assert lora_config(ModelConfig(lora_r=4), skeleton, dropout_is_set=False).lora_dropout == 0
    with pytest.raises(ConfigError, match="dropout cannot be applied") as error:
        lora_config(ModelConfig(lora_r=4, lora_dropout=0.1), skeleton_of(config_of("mixtral")))
    assert error.value.place == "--lora_dropout"
    assert lora_config(ModelConfig(lora_r=4, lora_dropout=0.0), skeleton_of(config_of("mixtral"))).lora_dropout == 0
    # Dropout is allowed if only the attention is adapted.
    attention = ModelConfig(lora_r=4, lora_dropout=0.1, lora_target_modules=["q_proj", "v_proj"])
    assert lora_config(attention, skeleton_of(config_of("mixtral"))).lora_dropout == 0.1
    assert lora_config(ModelConfig(lora_r=4), skeleton_of(config_of("phimoe")), dropout_is_set=False).lora_dropout > 0


@pytest.mark.parametrize(
    ("family", "targets", "said"),
    [
        ("glm4_moe", None, ["down_proj of model.layers.*.mlp, model.layers.*.mlp.shared_experts:"]),
        ("glm4_moe", ["q_proj", "gate_proj", "up_proj"], ["gate_proj, up_proj of model", "shared_experts:"]),
        ("glm4_moe", ["q_proj"], []),
        # Experts' names, of which there is no linear layer.
        ("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"], []),
        ("mixtral", None, []),
        ("llama", None, []),
    ],
)
def test_linears_that_peft_passes_over_are_named(family, targets, said):
    from transformers import AutoConfig

    from accel_scale.shrinking.shrink import shrink_model_config

    notes = []
    config = shrink_model_config(AutoConfig.for_model(family), vocab_size=512, min_layers=3)
    args = ModelConfig(lora_r=4, lora_target_modules=targets)
    lora_config(args, skeleton_of(config), dropout_is_set=False, note=notes.append)
    assert len(notes) == bool(said)
    assert all(name in notes[0] for name in said)


@pytest.mark.parametrize(
    ("architecture", "whole"), [("MixtralForSequenceClassification", None), ("MixtralForCausalLM", ["lm_head"])]
)
def test_a_head_that_is_trained_in_full_is_not_passed_over(architecture, whole):
    config, notes = config_of("mixtral"), []
    config.architectures = [architecture]
    args = ModelConfig(lora_r=4, lora_modules_to_save=whole)
    lora_config(args, skeleton_of(config), dropout_is_set=False, note=notes.append)
    assert notes == []


def test_magnitudes_of_experts_are_refused():
    with pytest.raises(ConfigError, match="no magnitudes") as error:
        lora_config(ModelConfig(lora_r=4, use_dora=True), skeleton_of(config_of("olmoe")), dropout_is_set=False)
    assert error.value.place == "--use_dora"


@pytest.mark.parametrize("targets", [["q_proj", "nonsense"], ["nonsense"], ["dt_proj", "q_proj"], [".*nothing"]])
def test_targets_that_would_train_nothing_are_refused(targets):
    with pytest.raises(ConfigError) as error:
        lora_config(ModelConfig(lora_target_modules=targets), skeleton_of(config_of("jamba")))
    assert error.value.place == "--lora_target_modules"
    assert "\n" not in error.value.one_line()


@pytest.mark.parametrize(
    ("flag", "words", "fix"),
    [
        ("lora_modules_to_save", ["lm_head", "embed_token"], "embed_tokens"),
        ("lora_target_parameters", ["experts.gate_up_projs"], "experts.gate_up_proj"),
    ],
)
def test_modules_and_parameters_that_are_not_there_are_refused(flag, words, fix):
    """PEFT would silently train the rest."""
    with pytest.raises(ConfigError, match=f"has no '{words[-1]}'") as error:
        lora_config(ModelConfig(**{flag: words}), skeleton_of(config_of("mixtral")), dropout_is_set=False)
    assert error.value.place == f"--{flag}"
    assert fix in error.value.one_line()


def test_one_pattern_stands_for_all_layers():
    names = [f"model.layers.{index}.mamba.dt_proj" for index in range(40)]
    assert exclusion(names) == r"model\.layers\.\d+\.mamba\.dt_proj"
    assert exclusion([]) is None


class Scaled(torch.nn.Linear):
    """A linear layer whose forward differs from nn.Linear's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.nn.functional.linear(x, self.weight, self.bias)


class Router(torch.nn.Linear):
    """A linear layer that also returns a choice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = torch.nn.functional.linear(x, self.weight)
        return product, product.argmax(-1)


class Grouped(torch.nn.Linear):
    """A linear layer that takes groups of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.weight.t().expand(x.shape[0], -1, -1))


class Summed(torch.nn.Linear):
    """A linear layer that returns one number per row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight).sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "is_linear"),
    [(torch.nn.Linear, True), (Scaled, True), (Router, False), (Grouped, False), (Summed, False)],
)
def test_what_is_still_a_linear_layer(kind, is_linear, dtype):
    from accel_scale.modeling.adapter_targets import _is_linear

    assert _is_linear(kind(6, 4, device="meta", dtype=dtype)) == is_linear
    assert _is_linear(kind(6, 4)), "with weights it is not run"


def test_every_flag_of_adapters_reaches_them() -> None:
    skeleton = skeleton_of(CONFIG_MAPPING["llama"](**DENSE))
    given = ModelConfig(
        lora_r=5, lora_alpha=11, lora_dropout=0.25, lora_target_modules=["q_proj"], lora_modules_to_save=["norm"],
        use_rslora=True, use_dora=True,
    )  # fmt: skip
    config = lora_config(given, skeleton)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.target_modules) == (5, 11, 0.25, {"q_proj"})
    assert (config.modules_to_save, config.use_rslora, config.use_dora, config.bias) == (["norm"], True, True, "none")
    fewer = SimpleNamespace(lora_r=4, lora_alpha=8, lora_dropout=0.0, lora_target_modules="all-linear")
    plain = lora_config(fewer, skeleton)
    assert (plain.modules_to_save, plain.use_rslora, plain.use_dora) == (None, False, False)
    assert (plain.target_parameters, plain.task_type) == (None, "CAUSAL_LM")
