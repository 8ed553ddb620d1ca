"""Split rows within one process: what a model learns about whole rows, what is restored, and what is refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accel_scale.errors import ConfigError
from accel_scale.parallel import sequence_attention
from accel_scale.parallel.sequence import cut_batch, enable_ulysses, pad_rows, uncut_rows
from accel_scale.parallel.sequence_attention import (
    EAGER_ULYSSES,
    WholeRowMask,
    current_positions,
    whole_rows_of,
    wrap_attention,
)
from accel_scale.parallel.sequence_rotary import use_longest_position
from accel_scale.trainers.sequence_mixin import SequenceParallelMixin


class Pair:
    """A group of two ranks that is only asked for its size."""

    def size(self) -> int:
        return 2


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo all registrations, so that other tests do not see them."""
    for registry in (ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS):
        monkeypatch.setattr(type(registry), "_global_mapping", dict(type(registry)._global_mapping))
        monkeypatch.setattr(registry, "_local_mapping", dict(registry._local_mapping))


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank's positions continue those of this rank."""

    def gather(positions: torch.Tensor, group: Any, size: int) -> torch.Tensor:
        return torch.cat([positions, positions + positions.shape[1]], 1)

    monkeypatch.setattr(sequence_attention, "gather_positions", gather)


def model(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()


IDS = torch.arange(8)[None]


# ── Batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_no_tensor_or_no_label_is_no_obstacle() -> None:
    part = cut_batch({"input_ids": IDS, "labels": None, "names": ["a"]}, 1, 2)  # type: ignore[dict-item]
    assert part.keys() == {"input_ids", "position_ids"}
    assert all(tensor.is_contiguous() for tensor in part.values())
    with pytest.raises(ConfigError, match="a batch with scores, token_type_ids cannot"):
        cut_batch({"input_ids": IDS, "token_type_ids": IDS, "scores": IDS}, 0, 2)


@pytest.mark.parametrize(
    ("mask", "is_taken"),
    [
        ([[1, 1, 1, 1], [1, 0, 0, 0]], True),
        ([[1, 1, 1, 1], [1, 0, 1, 1]], False),
        ([[1, 1, 0, 0], [0, 1, 1, 0]], False),
        ([[[1, 1, 1, 1]]], False),
    ],
)
def test_padding_on_the_right_needs_no_mask(mask: list[Any], is_taken: bool) -> None:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.tensor(mask)}
    if is_taken:
        assert "attention_mask" not in cut_batch(batch, 0, 2)
    else:
        with pytest.raises(ConfigError, match="in front of or between"):
            cut_batch(batch, 0, 2)


def test_what_fills_up_rows_is_seen_by_nobody() -> None:
    batch = {"input_ids": IDS[:, :5], "attention_mask": torch.ones(1, 5), "names": ["a"], "labels": IDS[:, :5]}
    filled = pad_rows(batch, 4, pad_token_id=9)
    assert filled["input_ids"].tolist() == [[0, 1, 2, 3, 4, 9, 9, 9]]
    assert filled["attention_mask"].tolist() == [[1] * 5 + [0] * 3]
    assert filled["labels"].tolist() == [[0, 1, 2, 3, 4, -100, -100, -100]]
    assert filled["names"] == ["a"]
    even = pad_rows(batch, 5, pad_token_id=9)
    assert even == batch
    assert even is not batch


# ── The model ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_rank_changes_nothing_and_twice_is_once() -> None:
    made = model()
    enable_ulysses(made, SimpleNamespace(size=lambda: 1))
    assert "forward" not in vars(made.model)
    enable_ulysses(made, SimpleNamespace(get_group=Pair))
    assert made._ulysses_size == 2
    forward = made.model.forward
    enable_ulysses(made, Pair())
    assert made.model.forward is forward
    assert made.config._attn_implementation == "sdpa"
    assert forward.__wrapped__ is type(made.model).forward


def test_adapters_have_their_base_models_forward_changed() -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model(), LoraConfig(target_modules=["q_proj"]))
    enable_ulysses(adapted, Pair())
    assert "forward" in vars(adapted.get_base_model().model)
    assert adapted.get_base_model()._ulysses_size == 2


@pytest.mark.parametrize("name", ["sinks", "relative_attention_bias"])
def test_a_weight_for_each_head_is_refused_and_none_is_not(name: str) -> None:
    made = model()
    attention = made.model.layers[0].self_attn
    setattr(attention, name, None)
    enable_ulysses(made, Pair())
    other = model()
    setattr(other.model.layers[0].self_attn, name, nn.Parameter(torch.ones(2)))
    with pytest.raises(ConfigError, match=f"LlamaAttention has {name}, a weight for each head"):
        enable_ulysses(other, Pair())


def test_whole_rows_and_generation_go_the_old_way_and_half_calls_are_refused(doubled: None) -> None:
    made = model()
    with torch.no_grad():
        expected = made(IDS).logits
        enable_ulysses(made, Pair())
        for wrong in ({}, {"position_ids": IDS, "attention_mask": torch.ones_like(IDS)}):
            with pytest.raises(ConfigError, match="takes parts of rows with their position ids, and no mask"):
                made(IDS, **wrong)
        with uncut_rows():
            assert torch.equal(made(IDS).logits, expected)
        with pytest.raises(ConfigError):
            made(IDS)
        generated = made.generate(IDS[:, :3], max_new_tokens=4, do_sample=False)
        assert torch.equal(generated, model().generate(IDS[:, :3], max_new_tokens=4, do_sample=False))


def test_eager_attention_has_another_name_and_is_found_by_its_module() -> None:
    made = model("eager")
    with torch.no_grad():
        expected = made(IDS).logits
        enable_ulysses(made, Pair())
        assert made.config._attn_implementation == EAGER_ULYSSES
        with uncut_rows():
            assert torch.equal(made(IDS).logits, expected)
    with pytest.raises(RuntimeError, match="Linear has no eager_attention_forward"):
        ALL_ATTENTION_FUNCTIONS[EAGER_ULYSSES](nn.Linear(1, 1), IDS, IDS, IDS, None)


def test_functions_are_wrapped_once() -> None:
    for name in ("sdpa", "eager"):
        target = wrap_attention(name)
        held = ALL_MASK_ATTENTION_FUNCTIONS[target], ALL_ATTENTION_FUNCTIONS[target]
        assert all(one.wrapped_for_whole_rows for one in held)
        assert wrap_attention(target) == target
        assert (ALL_MASK_ATTENTION_FUNCTIONS[target], ALL_ATTENTION_FUNCTIONS[target]) == held
    with pytest.raises(KeyError):
        wrap_attention("no attention")


def test_a_model_that_asks_for_no_mask_has_not_seen_whole_rows(doubled: None) -> None:
    assert current_positions() is None
    seen = []
    with pytest.raises(RuntimeError, match="asked transformers for no attention mask"), whole_rows_of(IDS, Pair(), 2):
        seen.append(current_positions())
    assert seen[0].tolist() == [list(range(16))]
    assert current_positions() is None
    with pytest.raises(KeyError), whole_rows_of(IDS, Pair(), 2):
        raise KeyError
    assert current_positions() is None


def test_masks_are_those_of_whole_rows() -> None:
    """Two documents, the second of which crosses the cut; the mask on a rank equals the mask of one process."""
    whole = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    wrap_attention("sdpa")
    make = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query

    given = {"batch_size": 1, "mask_function": causal, "attention_mask": None, "device": torch.device("cpu")}
    here = {**given, "q_length": 4, "kv_length": 4, "q_offset": 0, "kv_offset": 0, "allow_is_causal_skip": True}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sequence_attention, "gather_positions", lambda *_: whole)
        with whole_rows_of(whole[:, 4:], "group", 2):
            found = make(**{**here, "attention_mask": torch.ones(1, 4)})
    assert isinstance(found, WholeRowMask)
    assert (found.group, found.size) == ("group", 2)
    assert found.keywords.keys() == {"position_ids"}
    assert torch.equal(found.keywords["position_ids"], whole)
    document = (whole == 0).cumsum(1)[0]
    expected = torch.ones(8, 8, dtype=torch.bool).tril() & (document[:, None] == document[None])
    assert torch.equal(found.mask[0, 0], expected)
    plain = make(**here)
    assert not isinstance(plain, WholeRowMask), "outside of parts nothing is changed"


@pytest.mark.parametrize("is_packed", [True, False])
def test_flash_attention_gets_the_lengths_of_documents(is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4] if is_packed else list(range(8))])
    name = "flash_attention_2"
    seen: list[Any] = []

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append((query.shape, mask, kwargs))
        return query.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    wrap_attention(name)
    monkeypatch.setattr(sequence_attention, "gather_positions", lambda *_: whole)
    monkeypatch.setattr(
        sequence_attention, "to_whole_rows", lambda q, k, v, group, size: (q[:, :1], k[:, :1], v[:, :1])
    )
    monkeypatch.setattr(sequence_attention, "to_parts", lambda output, group, size: (output, group, size))
    with whole_rows_of(whole[:, :4], "group", 2):
        masks = [ALL_MASK_ATTENTION_FUNCTIONS[name](attention_mask=None) for _ in range(2)]
    assert [mask.mask for mask in masks] == [None, None]
    lengths = {"cu_seq_lens_q": [0, 3, 8], "cu_seq_lens_k": [0, 3, 8], "max_length_q": 5, "max_length_k": 5}
    found = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in masks[1].keywords.items()}
    assert found == {"position_ids": None, **(lengths if is_packed else {})}
    query, key = torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8)
    module = SimpleNamespace(num_key_value_groups=2)
    output, weights = ALL_ATTENTION_FUNCTIONS[name](module, query, key, key, masks[0], position_ids=IDS, scaling=0.5)
    assert weights is None
    assert output[1:] == ("group", 2)
    (shape, mask, kwargs) = seen[0]
    assert (tuple(shape), mask, kwargs["position_ids"], kwargs["scaling"]) == ((1, 1, 4, 8), None, None, 0.5)
    assert module.num_key_value_groups == 2, "put back"
    ALL_ATTENTION_FUNCTIONS[name](module, query, key, key, None, scaling=0.25)
    assert seen[1][1:] == (None, {"scaling": 0.25})
    assert tuple(seen[1][0]) == (1, 2, 4, 8)


def test_query_groups_are_those_of_the_heads_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        groups.append(getattr(module, "num_key_value_groups", None))
        return [query]

    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)
    wrap_attention("sdpa")
    monkeypatch.setattr(sequence_attention, "to_whole_rows", lambda q, k, v, group, size: (q, k, v))
    monkeypatch.setattr(sequence_attention, "to_parts", lambda output, group, size: output)
    mask = WholeRowMask(None, "group", 2, {})
    for module in (SimpleNamespace(num_key_value_groups=4), SimpleNamespace()):
        ALL_ATTENTION_FUNCTIONS["sdpa"](module, torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4), None, mask)
        assert vars(module) in ({"num_key_value_groups": 4}, {})
    assert groups == [2, None]


# ── Frequencies that depend on the longest position ──────────────────────────────────────────────────────────────────


class Rotary(nn.Module):
    """Frequencies that depend on the longest position in its input."""

    def __init__(self, rope_type: Any) -> None:
        super().__init__()
        self.rope_type = rope_type

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = position_ids / position_ids.max()
        return scaled, -scaled


@pytest.mark.parametrize(
    ("kind", "is_wrapped"),
    [
        ("dynamic", True), ("longrope", True), ("dynamic_ntk", True), ("yarn", False), (None, False), (3, False),
        ({"a": "default", "b": "longrope"}, True), ({"a": "default"}, False),
    ],
)  # fmt: skip
def test_longest_positions_are_those_of_whole_rows(kind: Any, is_wrapped: bool, doubled: None) -> None:
    made = nn.Sequential(Rotary(kind))
    use_longest_position(made)
    assert ("forward" in vars(made[0])) == is_wrapped
    forward = made[0].forward
    use_longest_position(made)
    assert made[0].forward == forward
    x, positions = torch.zeros(1), torch.arange(1, 5).repeat(2, 1)
    assert torch.equal(made[0](x, positions)[0], positions / 4), "outside of parts: what is there"
    with pytest.raises(RuntimeError), whole_rows_of(positions, Pair(), 2):
        cos, sin = made[0](x, positions)
    assert torch.equal(cos, positions / (8 if is_wrapped else 4))
    assert torch.equal(sin, -cos)


def test_frequencies_inside_of_layers_are_refused() -> None:
    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = Rotary("dynamic")

    with pytest.raises(ConfigError, match="Rotary scales its frequencies by the length of a row, in each layer"):
        use_longest_position(nn.Sequential(Layer()))


# ── The trainer ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Below:
    """The parts of a trainer that the mixin uses, on the second of two ranks in the first of two groups."""

    gather_function = None

    def __init__(self, **given: Any) -> None:
        state = SimpleNamespace(end_of_dataloader=False, remainder=-1)
        self.accelerator = SimpleNamespace(num_processes=4, gradient_state=state, gather=lambda values: values)
        self.processing_class = SimpleNamespace(pad_token_id=7)
        self.given = given

    def get_total_train_batch_size(self, args: Any) -> int:
        return 32

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self.given.get("num_items")

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        return self.gather_function, args, kwargs

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        return "as it was", model, inputs, prediction_loss_only, ignore_keys

    def create_accelerator_and_postprocess(self) -> None:
        self.accelerator.is_made = True

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def compute_loss_context_manager(self) -> Any:
        return torch.no_grad()


class Trainer(SequenceParallelMixin, Below):
    pass


def trainer(size: int, **given: Any) -> Any:
    made = Trainer(**given)
    made.sp_size, made._sp_group = size, "group"
    return made


def test_groups_count_rows_and_labels_once() -> None:
    assert Trainer().sp_size == 1
    assert [trainer(size).get_total_train_batch_size(None) for size in (1, 2, 4)] == [32, 16, 8]
    found = [trainer(size, num_items=torch.tensor(12))._get_num_items_in_batch([]) for size in (1, 2)]
    assert [int(one) for one in found] == [12, 6]
    assert trainer(2)._get_num_items_in_batch([]) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_its_part_of_the_filled_up_rows(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: {"group": rank}[group])
    row = {"input_ids": IDS[:, :7], "labels": IDS[:, :7], "cu_seq_lens_q": torch.tensor([0, 7]), "row_facts": 3}
    assert trainer(1).held_part(row) is row
    part = trainer(2).held_part({**row, "max_length_q": 7, "seq_idx": IDS})
    whole = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    assert torch.equal(part["input_ids"], whole[:, 4 * rank : 4 * rank + 4])
    assert part.keys() == {"input_ids", "position_ids", "shift_labels"}


def test_an_evaluated_row_counts_once() -> None:
    """Four ranks in two groups; each rank contributes two values, those of the rows that its group has read."""
    made = trainer(2)
    function, args, kwargs = made.evaluation_loop("loader", description="d")
    assert (args, kwargs) == (("loader",), {"description": "d"})
    values = torch.tensor([1, 2, 1, 2, 3, 4, 3, 4])
    assert function(values).tolist() == [1, 2, 3, 4]
    state = made.accelerator.gradient_state
    for end, remainder, expected in ((True, 3, 3), (True, 0, 4), (True, -1, 4), (False, 3, 4), (True, 1, 1)):
        state.end_of_dataloader, state.remainder = end, remainder
        assert len(function(values)) == expected
    assert trainer(1).evaluation_loop("loader")[0] is None


def test_an_evaluated_loss_is_the_mean_over_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(2)
    asked: list[Any] = []

    def compute_loss(model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        asked.append((int(num_items_in_batch), torch.is_grad_enabled()))
        return torch.tensor(3.0, requires_grad=True) * 4  # scaled as for a mean of gradients over four ranks

    def all_reduce(value: torch.Tensor, group: Any) -> None:
        assert group == "group"
        value += 2.0  # the other rank's part

    made.compute_loss = compute_loss
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    loss, logits, labels = made.prediction_step("model", {"labels": torch.tensor([[1, 2, -100, 3]])}, True)
    assert (loss.item(), logits, labels, loss.requires_grad) == (5.0, None, None, False)
    made.prediction_step("model", {"labels": torch.full((1, 4), -100)}, True)
    assert asked == [(2, False), (1, False)]
    assert trainer(1).prediction_step("model", {}, True, ["k"]) == ("as it was", "model", {}, True, ["k"])


@pytest.mark.parametrize("size", [1, 2])
def test_loaders_are_prepared_for_groups(size: int) -> None:
    made = trainer(size)
    made.accelerator = Accelerator(cpu=True)
    made.create_accelerator_and_postprocess()
    assert made.accelerator.is_made
    assert ("prepare_data_loader" in vars(made.accelerator)) == (size == 2)


def test_twins_whose_heads_do_not_divide_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's model and its random numbers stay as they are."""
    from accel_scale.start_check import twin
    from accel_scale.trainers import sequence_mixin

    compared: list[Any] = []
    monkeypatch.setattr(torch.distributed, "new_subgroups", lambda group_size, backend: ((group_size, backend), []))
    monkeypatch.setattr(sequence_mixin, "enable_ulysses", lambda made, group: compared.append((type(made), group)))
    monkeypatch.setattr(sequence_mixin, "check_ulysses", lambda made, group: compared.append(group))
    config = copy.deepcopy(model().config)
    state = torch.get_rng_state()
    sequence_mixin.check_on_twin(config, 2)
    assert compared == [(LlamaForCausalLM, (2, "gloo")), (2, "gloo")]
    assert torch.equal(torch.get_rng_state(), state)
    sequence_mixin.check_on_twin(config, 64)
    assert len(compared) == 2

    def no_twin(*args: Any, **kwargs: Any) -> Any:
        raise twin.NoTwin("too large")

    monkeypatch.setattr(twin, "build_twin", no_twin)
    sequence_mixin.check_on_twin(config, 2)
    assert len(compared) == 2
