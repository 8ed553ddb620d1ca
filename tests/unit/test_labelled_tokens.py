"""The last layer computed for labelled tokens only: same loss and gradients, and less work."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.packing.row_facts import ROW_FACTS, RowFacts
from accel_scale.optimization.fast_loss import FastLossMixin, add_fast_lm_head
from accel_scale.optimization.labelled_tokens import skip_unlabelled

SMALL = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
IDS = torch.randint(1, 60, (3, 20), generator=torch.Generator().manual_seed(0))
LABELS = IDS.clone()
LABELS[:, :14] = -100
LABELS[2, 17:] = -100  # padding
NUM_ROWS = 32  # 15 labels, and other tokens for a multiple of 32


def model(kind: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    settings = GPT2 if kind == "gpt2" else SMALL if kind in ("rwkv", "mamba") else {**SMALL, **HEADS}
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**settings, **changes}))
    add_fast_lm_head(made)
    return made.train()


def batch(labels: torch.Tensor = LABELS) -> dict[str, Any]:
    inputs = {"input_ids": IDS, "labels": labels}
    return {**inputs, ROW_FACTS: RowFacts(inputs), "fast_lm_head": True}


def step(made: Any, **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    made.zero_grad()
    loss = made(**(inputs or batch())).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}


def rows_of(module: torch.nn.Module) -> list[int]:
    """The list that gets the number of tokens of each call of a module."""
    seen: list[int] = []
    module.register_forward_hook(lambda _, args, output: seen.append(args[0].shape[:-1].numel()))
    return seen


def assert_same(first: Any, second: Any) -> None:
    assert first[0] == pytest.approx(second[0], rel=1e-6)
    assert first[1].keys() == second[1].keys()
    for name, gradient in second[1].items():
        torch.testing.assert_close(first[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("policy", ["none", "full", "every_2", "selective", "offload", "mlp", "full+tiles"])
def test_gradients_are_those_of_all_tokens_whatever_is_recomputed(policy: str) -> None:
    made = model()
    whole = step(made)
    skip_unlabelled(made)
    skip_unlabelled(made)
    chosen = CheckpointingPolicy("full", in_tiles=True) if "tiles" in policy else CheckpointingPolicy.parse(policy)
    apply_checkpointing(made, chosen, tile_rows=4)
    assert_same(step(made), whole)
    assert_same(step(made), whole)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "gemma3_text", "olmo2", "qwen3", "cohere", "glm4", "phi"])
def test_architectures_with_a_dense_mlp(kind: str) -> None:
    made = model(kind)
    whole = step(made)
    skip_unlabelled(made)
    mlp = [module for name, module in made.named_modules() if name.endswith(".mlp")][-1]
    seen = rows_of(next(child for child in mlp.children() if hasattr(child, "weight")))
    assert_same(step(made), whole)
    assert seen == [NUM_ROWS]


def test_queries_and_outputs_of_the_last_attention_are_among_the_products_saved() -> None:
    made = model()
    skip_unlabelled(made)
    last = made.model.layers[-1].self_attn
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    seen = {name: rows_of(getattr(last, name)) for name in names}
    before = rows_of(made.model.layers[0].self_attn.o_proj)
    step(made)
    assert [seen[name] for name in names] == [[NUM_ROWS], [60], [60], [NUM_ROWS]]
    assert before == [60]


def test_a_fused_product_of_queries_keys_and_values_is_computed_for_all_tokens() -> None:
    made = model("gpt_neox")
    whole = step(made)
    skip_unlabelled(made)
    attention = made.gpt_neox.layers[-1].attention
    seen = [rows_of(attention.query_key_value), rows_of(attention.dense)]
    assert_same(step(made), whole)
    assert seen == [[60], [NUM_ROWS]]


def test_attention_that_experts_follow_is_computed_for_all_tokens() -> None:
    made = model("mixtral")  # the router's auxiliary loss is a mean over all of them
    skip_unlabelled(made)
    seen = rows_of(made.model.layers[-1].self_attn.o_proj)
    step(made)
    assert seen == [60]


@pytest.mark.parametrize("kind", ["mixtral", "rwkv", "mamba"])
def test_experts_and_mlps_with_a_memory_of_other_tokens_are_left_alone(kind: str) -> None:
    made = model(kind)
    whole = step(made)
    skip_unlabelled(made)
    assert not hasattr(made, "_labelled_tokens")
    assert_same(step(made), whole)


def test_an_mlp_that_layers_share_is_left_alone() -> None:
    made = model()
    made.model.layers[0].mlp = made.model.layers[1].mlp
    whole = step(made)
    skip_unlabelled(made)
    assert_same(step(made), whole)


def test_what_is_not_wanted_any_more_is_not_skipped() -> None:
    made = model()
    skip_unlabelled(made)
    seen = rows_of(made.model.layers[-1].mlp.gate_proj)
    for wanted in (False, True):
        skip_unlabelled(made, wanted)
        step(made)
    assert seen == [60, NUM_ROWS]


def test_adapters_and_a_copy_of_the_model_learn_the_same() -> None:
    made = model()
    made = get_peft_model(made, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    whole = step(made)
    skip_unlabelled(made.get_base_model())
    seen = rows_of(made.get_base_model().model.layers[-1].mlp.down_proj)
    assert_same(step(made), whole)
    twin = copy.deepcopy(made)
    assert_same(step(twin), whole)
    assert seen == [NUM_ROWS] * 2


def test_only_a_micro_batch_whose_labels_are_counted_and_few_is_selected() -> None:
    made = model()
    skip_unlabelled(made)
    seen = rows_of(made.model.layers[-1].mlp.gate_proj)
    every, none = IDS.clone(), torch.full_like(IDS, -100)
    step(made)
    step(made, **batch(every))
    step(made, **batch(none))
    step(made, input_ids=IDS, labels=LABELS, fast_lm_head=True)
    assert seen == [NUM_ROWS, 60, 60, 60]


def test_other_calls_of_the_model_see_every_token() -> None:
    made, plain = model().eval(), model().eval()
    skip_unlabelled(made)
    with torch.no_grad():
        made(**batch())
        assert torch.equal(made(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    step(made)
    assert torch.equal(made(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    made(**batch())  # no backward pass, as after an error
    assert torch.equal(made(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert torch.equal(made.model(IDS).last_hidden_state, plain.model(IDS).last_hidden_state)


class _Trl:
    """What `FastLossMixin` uses of TRL's trainer."""

    def __init__(self, made: Any, *, skips: bool, compiles: bool, ranks: int) -> None:
        self.skips_unlabelled = skips
        self.model, self.data_collator, self._tp_size = made, None, ranks
        self.label_smoother = self.compute_loss_func = None
        self.aux_loss_enabled = self._is_vision_dataset = False
        self.args = SimpleNamespace(loss_type="nll", torch_compile=compiles)
        self.accelerator = SimpleNamespace(parallelism_config=None)


class _Trainer(FastLossMixin, _Trl):
    pass


@pytest.mark.parametrize(
    ("skips", "compiles", "ranks", "rows"),
    [(True, False, 1, NUM_ROWS), (False, False, 1, 60), (True, True, 1, 60), (True, False, 2, 60)],
)
def test_the_trainer_skips_what_was_checked_unless_it_is_compiled_or_shared_by_ranks(
    skips: bool, compiles: bool, ranks: int, rows: int
) -> None:
    made = model()
    _Trainer(made, skips=skips, compiles=compiles, ranks=ranks)
    seen = rows_of(made.model.layers[-1].mlp.gate_proj)
    step(made)
    assert seen == [rows]
