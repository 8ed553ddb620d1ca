"""Which modules are recomputed and which are left alone, and the optimizers that this project creates itself."""

from __future__ import annotations

import contextlib
import functools
import shutil
import types
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scale.errors import ConfigError
from accel_scale.modeling import activation_checkpointing
from accel_scale.modeling.activation_checkpointing import (
    CheckpointingPolicy,
    apply_checkpointing,
    find_blocks,
    keep_attention_and_matmuls,
)
from accel_scale.optimization.optimizers import (
    check_optimizer,
    create_optimizer,
    optimizer_cls_and_kwargs,
    parse_optim_args,
)

NUM_LAYERS = 4


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=NUM_LAYERS, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


class Block(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.linear(x).tanh()


class Stacks(nn.Module):
    """Blocks among lists that are not stacks: with one module, of several classes, without parameters, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = nn.ModuleList([Block(64)])
        self.mixed = nn.ModuleList([nn.Linear(64, 64), Block(64)])
        self.small = nn.ModuleList([Block(2), Block(2)])
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_LAYERS)])
        self.empty = nn.Sequential(nn.Tanh(), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def replaced(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if "forward" in vars(part)]


@pytest.mark.parametrize(
    ("kind", "every_n", "in_tiles"),
    [
        ("every_n", 1, False), ("full", 2, False), ("none", 0, False), ("some", 1, False), ("every_n", -1, False),
        ("selective", 1, True), ("mlp", 1, True), ("attention", 1, True),
    ],
)  # fmt: skip
def test_policies_that_do_not_exist(kind: str, every_n: int, in_tiles: bool) -> None:
    with pytest.raises(ConfigError):
        CheckpointingPolicy(kind, every_n, in_tiles)


def test_policies_in_tables() -> None:
    assert CheckpointingPolicy("full", in_tiles=True).label == "full, in tiles"
    assert CheckpointingPolicy("every_n", 3).label == "every_3"
    with pytest.raises(ConfigError) as refused:
        CheckpointingPolicy.parse("zzz", place="file:3")
    assert refused.value.place == "file:3"
    assert "did you mean" not in refused.value.fix


@pytest.mark.parametrize("policy", ["attention", "mlp"])
def test_a_part_of_each_layer_is_released_again_and_other_forwards_stay(policy: str) -> None:
    model = llama()
    own = functools.partial(type(model.lm_head).forward, model.lm_head)
    model.lm_head.forward = own
    name = {"attention": "self_attn", "mlp": "mlp"}[policy]
    parts = [f"model.layers.{index}.{name}" for index in range(NUM_LAYERS)]
    for _ in range(2):
        apply_checkpointing(model, CheckpointingPolicy(policy))
        assert replaced(model) == [*parts, "lm_head"]
        forward = model.get_submodule(parts[0]).forward
        assert forward.args[0].__func__ is type(model.get_submodule(parts[0])).forward, "not one around another"
    apply_checkpointing(model, CheckpointingPolicy("none"))
    assert replaced(model) == ["lm_head"]
    assert model.lm_head.forward is own
    assert not model._has_long_rows


def test_parts_are_recomputed_in_training_with_gradients_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    checkpoint = activation_checkpointing._checkpoint

    def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return checkpoint(function, *args, **kwargs)

    monkeypatch.setattr(activation_checkpointing, "_checkpoint", counted)
    model, ids = llama(), torch.arange(6)[None]
    apply_checkpointing(model, CheckpointingPolicy("mlp"))
    expected = model(ids).logits
    assert calls == [{"use_reentrant": False}] * NUM_LAYERS
    calls.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected)
    torch.testing.assert_close(model.eval()(ids).logits, expected)
    assert calls == []


@pytest.mark.parametrize(
    ("text", "chosen"),
    [("full", [0, 1, 2, 3]), ("every_2", [0, 2]), ("every_3", [0, 3]), ("offload", [0, 1, 2, 3]), ("none", [])],
)
def test_blocks_of_a_plain_module_are_recomputed_with_the_same_gradients(text: str, chosen: list[int]) -> None:
    torch.manual_seed(0)
    model, x = Stacks().train(), torch.randn(3, 8)
    model(x).square().sum().backward()
    expected = [block.linear.weight.grad.clone() for block in model.blocks]
    apply_checkpointing(model, CheckpointingPolicy("full"))
    apply_checkpointing(model, CheckpointingPolicy.parse(text))
    assert replaced(model) == [f"blocks.{index}" for index in chosen]
    model.zero_grad()
    model(x).square().sum().backward()
    for block, grad in zip(model.blocks, expected, strict=True):
        torch.testing.assert_close(block.linear.weight.grad, grad)


def test_the_largest_stack_of_one_class_is_found() -> None:
    model = Stacks()
    assert find_blocks(model) is model.blocks
    assert find_blocks(model, "small") is model.small
    with pytest.raises(ConfigError, match=r"no ModuleList or Sequential called 'alone\.0'") as refused:
        find_blocks(model, "alone.0")
    assert refused.value.fix == "use one of alone, mixed, small, blocks, empty."
    with pytest.raises(ConfigError, match="has no stack of blocks"):
        find_blocks(nn.ModuleDict({"empty": nn.Sequential(nn.Tanh(), nn.Tanh())}))
    with pytest.raises(ConfigError) as nothing:
        find_blocks(nn.Linear(1, 1), "blocks")
    assert nothing.value.fix == "name a stack of blocks."
    named = llama()
    apply_checkpointing(named, CheckpointingPolicy("full"), blocks="model.layers")
    assert replaced(named) == [f"model.layers.{index}" for index in range(NUM_LAYERS)]
    assert not named.is_gradient_checkpointing


def test_distances_up_to_the_number_of_layers() -> None:
    model = llama()
    apply_checkpointing(model, CheckpointingPolicy("every_n", NUM_LAYERS))
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, False, False]
    with pytest.raises(ConfigError, match="every_5 asks for more layers than the 4"):
        apply_checkpointing(model, CheckpointingPolicy("every_n", NUM_LAYERS + 1))


@pytest.mark.parametrize("kind", ["selective", "attention", "mlp"])
def test_what_reentrant_checkpointing_cannot_do(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind} does not work with reentrant"):
        apply_checkpointing(llama(), CheckpointingPolicy(kind), use_reentrant=True)
    apply_checkpointing(llama(), CheckpointingPolicy("full"), use_reentrant=True)


def test_products_and_attention_are_kept_and_the_rest_is_not() -> None:
    from torch.utils.checkpoint import CheckpointPolicy

    class Hashed:
        def __str__(self) -> str:
            return "_vllm_fa2.flash_attn_8af3"

    for operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, Hashed()):
        assert keep_attention_and_matmuls(None, operator) == CheckpointPolicy.MUST_SAVE
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert keep_attention_and_matmuls(None, flash) == CheckpointPolicy.MUST_SAVE
    for operator in (torch.ops.aten.add.Tensor, torch.ops.aten.tanh.default):
        assert keep_attention_and_matmuls(None, operator) == CheckpointPolicy.PREFER_RECOMPUTE


# ── Optimizers ───────────────────────────────────────────────────────────────────────────────────────────────────────

ADAM = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.25}


def settings(**changes: Any) -> Any:
    values = {"learning_rate": 0.5, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "weight_decay": 0.25}
    return types.SimpleNamespace(**{**values, "optim_args": None, "warmup_steps": 0, **changes})


@pytest.mark.parametrize(
    ("name", "where", "options", "expected"),
    [
        ("adamw_torch_foreach", {}, None, ("AdamW", {**ADAM, "foreach": True})),
        ("sgd_momentum", {}, None, ("SGD", {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.25})),
        ("sgd_momentum", {}, "momentum=0.5", ("SGD", {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.25})),
        ("adamw_cpu_offload", {"device_type": "cuda"}, None, ("OffloadedAdamW", {**ADAM, "fused": True})),
        ("deepspeed_cpu_adam", {"strategy": "zero2", "offload_optimizer": True}, None, ("AdamW", ADAM)),
        ("deepspeed_cpu_adam", {}, None, ("DeepSpeedCPUAdam", ADAM)),
    ],
)
def test_those_that_are_made_here(
    name: str, where: dict[str, Any], options: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")
    made, kwargs = optimizer_cls_and_kwargs(name, settings(), optim_args=options, **where)
    assert (made.__name__, kwargs) == expected


def test_options_of_the_arguments_count_where_none_are_given() -> None:
    _, kwargs = optimizer_cls_and_kwargs("sgd_momentum", settings(optim_args="momentum=0.25"))
    assert kwargs["momentum"] == 0.25
    _, kwargs = optimizer_cls_and_kwargs("sgd_momentum", settings(optim_args="momentum=0.25"), optim_args={})
    assert kwargs["momentum"] == 0.9
    for text in ("momentum=0.5=1", "momentum", "=,momentum"):
        with pytest.raises(ConfigError, match="is not key=value"):
            parse_optim_args("sgd_momentum", text)
    assert parse_optim_args("sgd_momentum", " momentum=0.5 , ") == {"momentum": 0.5}
    with pytest.raises(ConfigError, match="takes no options for it"):
        optimizer_cls_and_kwargs(
            "deepspeed_cpu_adam",
            settings(),
            optim_args="fp32_optimizer_states=false",
            strategy="zero2",
            offload_optimizer=True,
        )


def test_usual_settings_of_an_optimizer() -> None:
    weight = nn.Parameter(torch.ones(2))
    group = create_optimizer("adamw_torch", [weight], lr=0.1).param_groups[0]
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.0, (0.9, 0.999), 1e-8)
    # Not offloaded unless requested: ZeRO without offload uses plain SGD unchanged.
    assert type(create_optimizer("sgd", [weight], lr=0.1, strategy="zero2")) is torch.optim.SGD
    assert optimizer_cls_and_kwargs("sgd", settings(), strategy="zero2")[0] is torch.optim.SGD
    assert check_optimizer("sgd", device_type="cuda", strategy="zero2") == []
    options = {"device_type": "cuda", "optim_args": "offload_gradients=true"}
    assert check_optimizer("adamw_cpu_offload", **options) == []
    with pytest.raises(ConfigError, match="clipped or accumulated"):
        check_optimizer("adamw_cpu_offload", **options, gradient_accumulation_steps=2)


@pytest.mark.parametrize(("there", "missing"), [((), "g++ and ninja"), (("g++",), "ninja"), (("ninja",), "g++")])
def test_compilers_that_are_missing_are_named(there: Any, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_scale.facts.optimizer_specs import OPTIMIZERS

    tools = OPTIMIZERS["deepspeed_cpu_adam"].compilers
    assert set(tools) == {"g++", "ninja"}
    monkeypatch.setattr(shutil, "which", lambda tool: "/bin/x" if tool in there else None)
    with pytest.raises(ConfigError) as refused:
        check_optimizer("deepspeed_cpu_adam", device_type="cpu")
    named = " and ".join(tool for tool in tools if tool not in there)
    assert f"needs {named}." in refused.value.problem
    assert "ninja-build" in refused.value.fix or "ninja" not in missing


def test_a_gradient_that_changed_after_its_copy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake device counts which copies are made, and which of them the step waits for."""
    from accel_scale.optimization.offload_optimizer import offload_optimizer_class

    recorded: list[int] = []
    waited: list[int] = []

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

        def synchronize(self) -> None: ...

        def record_event(self) -> Any:
            recorded.append(len(recorded))
            return types.SimpleNamespace(synchronize=lambda number=recorded[-1]: waited.append(number))

    streams = {"Stream": Stream, "current_stream": Stream, "stream": lambda stream: contextlib.nullcontext()}
    for name, value in streams.items():
        monkeypatch.setattr(torch.xpu, name, value)
    monkeypatch.setattr("torchao.optim.cpu_offload.get_available_devices", lambda: ["cpu", "xpu"])
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, pin_memory=False, **given: empty_like(*args, **given))
    first, second, tiny = (nn.Parameter(torch.ones(size)) for size in (8192, 8192, 2))
    optimizer = offload_optimizer_class()([first, second, tiny], lr=0.1, minimal_size=4096)
    assert optimizer.defaults == {"lr": 0.1, "weight_decay": 0.01}
    (first.sum() + 2 * second.sum() + tiny.sum()).backward()
    assert recorded == [0, 1], "torchao's own copies, of the large ones"
    second.grad.mul_(0.5)
    optimizer.step()
    assert recorded == [0, 1, 2], "and the one that changed"
    assert sorted(waited) in ([0, 2], [1, 2])
    assert set(optimizer.state) >= {tiny}
    assert len(optimizer.state) == 3
