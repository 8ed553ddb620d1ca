"""Every optimizer learns, keeps the states it claims, resumes, and is refused where it cannot work."""

from __future__ import annotations

import contextlib
import io
import types

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scale.errors import ConfigError
from accel_scale.facts.optimizer_specs import OPTIMIZER_NAMES
from accel_scale.optimization.optimizers import (
    OPTIMIZERS,
    check_optimizer,
    create_optimizer,
    keep_embeddings_wide,
    optimizer_cls_and_kwargs,
    parse_optim_args,
    state_bytes_per_parameter,
)
from accel_scale.planning.cost.sharding import state_bytes as sharding_bytes
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.quiet import quiet_imports

quiet_imports()
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")

# Optimizers that step real CPU parameters without compiling anything first.
RUNNABLE = [name for name in OPTIMIZERS if name not in ("adamw_cpu_offload", "deepspeed_cpu_adam")]
LEARNING_RATES = {"sgd": 5.0, "sgd_momentum": 1.0, "adagrad": 1e-2, "adafactor": 1e-3}
# The reference optimizer of each, and how far its loss may be from the reference's after 20 steps.
TRAJECTORIES = {
    "adamw_torch_fused": ("adamw_torch", 1e-5),
    "adamw_torch_foreach": ("adamw_torch", 1e-5),
    "paged_adamw_32bit": ("adamw_torch", 1e-4),
    "adamw_bnb_8bit": ("adamw_torch", 5e-3),
    "paged_adamw_8bit": ("adamw_torch", 5e-3),
    "adamw_torch_8bit": ("adamw_torch", 5e-3),
    "adamw_torch_4bit": ("adamw_torch", 0.15),
    "lion_8bit": ("lion_32bit", 5e-3),
    "rmsprop_bnb": ("rmsprop", 1e-2),
    "rmsprop_bnb_8bit": ("rmsprop", 1e-2),
    "ademamix_8bit": ("ademamix", 1e-2),
}


@pytest.fixture(autouse=True)
def uncompiled():
    """Run torchao's step eagerly: the same arithmetic without a minute of C++ compilation."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def mlp(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 256, bias=False), torch.nn.GELU(), torch.nn.Linear(256, 64, bias=False)]
    return torch.nn.Sequential(*layers).to(dtype)


def problem(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(128, 64)
    return inputs.to(dtype), torch.tanh(inputs @ torch.randn(64, 64)).to(dtype)


def make(name: str, model: torch.nn.Module, **kwargs) -> torch.optim.Optimizer:
    kwargs.setdefault("lr", LEARNING_RATES.get(name, 5e-4 if "lion" in name else 1e-3))
    return create_optimizer(name, model.parameters(), **kwargs)


def steps(model, optimizer, num_steps: int) -> list[float]:
    inputs, targets = problem(next(model.parameters()).dtype)
    losses = []
    for _ in range(num_steps):
        loss = (model(inputs) - targets).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


_LOSSES: dict[str, list[float]] = {}


def trajectory(name: str) -> list[float]:
    """Losses of 20 steps from the same start, computed once per optimizer."""
    if name not in _LOSSES:
        model = mlp()
        _LOSSES[name] = steps(model, make(name, model), 20)
    return _LOSSES[name]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all per-parameter states, without step counters and bitsandbytes' shared lookup tables."""

    def num_bytes(tensor: torch.Tensor) -> int:
        if hasattr(tensor, "__tensor_flatten__"):  # torchao's quantised states consist of plain tensors
            names = [n for n in tensor.__tensor_flatten__()[0] if n != "qmap"]
            return sum(num_bytes(getattr(tensor, name)) for name in names)
        return tensor.numel() * tensor.element_size()

    return sum(
        num_bytes(value)
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.numel() > 1 and not key.startswith("qmap")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_lowers_the_loss(name):
    losses = trajectory(name)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(("name", "reference", "tolerance"), [(n, r, t) for n, (r, t) in TRAJECTORIES.items()])
def test_follows_the_optimizer_it_stands_for(name, reference, tolerance):
    assert trajectory(name) == pytest.approx(trajectory(reference), rel=tolerance)


@pytest.mark.parametrize("name", [n for n in RUNNABLE if n != "adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_bytes_are_as_claimed(name, dtype):
    model = mlp(dtype)
    optimizer = make(name, model)
    steps(model, optimizer, 1)
    num_parameters = sum(p.numel() for p in model.parameters())
    measured = state_bytes(optimizer) / num_parameters
    assert measured == pytest.approx(state_bytes_per_parameter(name, weight_bytes=dtype.itemsize), rel=1e-6)


def test_adafactor_keeps_rows_and_columns_only():
    model = mlp()
    optimizer = make("adafactor", model)
    steps(model, optimizer, 1)
    num_rows_and_columns = sum(sum(p.shape) for p in model.parameters())
    assert state_bytes(optimizer) == 4 * num_rows_and_columns


def test_low_bit_states_save_what_they_say():
    exact = state_bytes_per_parameter("adamw_torch")
    assert exact == 8
    assert exact / state_bytes_per_parameter("adamw_bnb_8bit") == pytest.approx(3.94, abs=0.01)
    assert exact / state_bytes_per_parameter("adamw_torch_4bit") == pytest.approx(7.76, abs=0.01)
    assert state_bytes_per_parameter("galore_adamw") is None


@pytest.mark.parametrize("name", RUNNABLE)
def test_resumes_exactly(name):
    model = mlp()
    optimizer = make(name, model)
    steps(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, file)
    expected = steps(model, optimizer, 3)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed_model = mlp()
    resumed = make(name, resumed_model)
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert steps(resumed_model, resumed, 3) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", [n for n in RUNNABLE if "adamw" in n])
def test_weight_decay_is_decoupled(name):
    """With zero gradients AdamW shrinks every weight by lr × weight decay; Adam with L2 would move further."""
    model = mlp()
    before = model[0].weight.detach().clone()
    optimizer = make(name, model, lr=0.1, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before * (1 - 0.1 * 0.5), rtol=1e-4, atol=1e-6)


def test_groups_keep_their_own_settings():
    model = mlp()
    groups = [
        {"params": [model[0].weight], "weight_decay": 0.0},
        {"params": [model[2].weight], "lr": 0.5},
    ]
    optimizer = create_optimizer("adamw_torch", groups, lr=0.1, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)
    first, second = optimizer.param_groups
    assert (first["lr"], first["weight_decay"], second["lr"], second["weight_decay"]) == (0.1, 0.0, 0.5, 0.2)
    assert (first["betas"], first["eps"]) == ((0.8, 0.9), 1e-6)


def test_every_name_of_transformers_is_there():
    from transformers.training_args import OptimizerNames

    assert {o.value for o in OptimizerNames} <= set(OPTIMIZER_NAMES)
    own = {"adamw_torch_foreach", "sgd_momentum", "adamw_cpu_offload", "deepspeed_cpu_adam"}
    assert set(OPTIMIZER_NAMES) - {o.value for o in OptimizerNames} == own


def training_args(**kwargs):
    values = {"learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-7, "weight_decay": 0.1}
    return types.SimpleNamespace(**{**values, "optim_args": None, "warmup_steps": 0, **kwargs})


def test_classes_and_arguments_are_those_of_transformers():
    from transformers import Trainer

    for name in ("adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_32bit", "lion_8bit", "adagrad", "adafactor"):
        theirs = Trainer.get_optimizer_cls_and_kwargs(training_args(optim=name), None)
        cls, kwargs = optimizer_cls_and_kwargs(name, training_args())
        assert cls is theirs[0]
        assert kwargs == {**theirs[1], "weight_decay": 0.1}


def test_a_trainer_builds_ours_with_its_parameter_groups(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    args = TrainingArguments(tmp_path, use_cpu=True, learning_rate=0.3, weight_decay=0.01)
    chosen = optimizer_cls_and_kwargs("sgd_momentum", args, optim_args="momentum=0.8")
    optimizer = Trainer(model, args, optimizer_cls_and_kwargs=chosen).create_optimizer()
    decayed, kept = optimizer.param_groups
    assert (decayed["lr"], decayed["momentum"], decayed["weight_decay"]) == (0.3, 0.8, 0.01)
    assert (kept["weight_decay"], len(decayed["params"]), len(kept["params"])) == (0.0, 1, 3)


@pytest.mark.parametrize(
    ("name", "options", "attribute", "expected"),
    [
        ("sgd", "momentum=0.5,nesterov=true", ("nesterov", "momentum"), (True, 0.5)),
        ("rmsprop", {"alpha": "0.9"}, ("alpha",), (0.9,)),
        ("rmsprop_bnb_8bit", "alpha=0.9", ("betas",), ((0.9, 0),)),  # the name that bitsandbytes uses
        ("ademamix", "alpha=2.0,t_alpha=10", ("alpha", "t_alpha"), (2.0, 10)),
    ],
)
def test_optim_args_reach_the_optimizer_with_their_types(name, options, attribute, expected):
    optimizer = make(name, mlp(), optim_args=options)
    assert tuple(optimizer.param_groups[0][key] for key in attribute) == expected


def test_options_of_another_packages_optimizer_are_left_to_transformers():
    assert parse_optim_args("galore_adamw", "rank=64,scale=0.25") == {"rank": "64", "scale": "0.25"}
    assert parse_optim_args("galore_adamw", None) == {}


def test_torchao_block_size_and_stochastic_rounding():
    model = mlp(torch.bfloat16)
    optimizer = make("adamw_torch_8bit", model, optim_args="block_size=128,bf16_stochastic_round=true")
    assert (optimizer.block_size, optimizer.bf16_stochastic_round) == (128, True)
    steps(model, optimizer, 1)
    # Twice as many scales as with blocks of 256: 2 × (1 + 4 / 128) bytes.
    assert state_bytes(optimizer) / sum(p.numel() for p in model.parameters()) == pytest.approx(2.0625)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw_torch", "amsgrad=true"),  # transformers ignores it
        ("sgd", "momentm=0.9"),
        ("sgd", "momentum=high"),
        ("sgd", "momentum"),
        ("adamw_torch_8bit", "bf16_stochastic_round=maybe"),
    ],
)
def test_optim_args_that_would_be_ignored_are_refused(name, options):
    with pytest.raises(ConfigError) as error:
        parse_optim_args(name, options)
    assert error.value.place == "--optim_args"


@pytest.mark.parametrize(
    ("name", "where", "fix"),
    [
        ("adamw_torch_fusd", {}, "adamw_torch_fused"),
        ("galore_adamw", {}, "pip install galore-torch"),
        ("stable_adamw", {}, "pip install torch-optimi"),
        ("adamw_cpu_offload", {}, "adamw_torch_fused"),
        ("adamw_cpu_offload", {"device_type": "cuda", "strategy": "ddp"}, "zero2_offload.yaml"),
        ("adamw_cpu_offload", {"device_type": "cuda", "strategy": "fsdp2"}, "zero2_offload.yaml"),
        ("adamw_cpu_offload", {"device_type": "cuda", "precision": "fp16"}, "adamw_torch_fused"),
        ("deepspeed_cpu_adam", {"device_type": "cuda"}, "zero2_offload.yaml"),
        ("deepspeed_cpu_adam", {"strategy": "zero2"}, "zero2_offload.yaml"),
        ("deepspeed_cpu_adam", {"strategy": "fsdp2"}, "adamw_torch_fused"),
        ("adamw_bnb_8bit", {"strategy": "fsdp2"}, "adamw_torch_8bit"),
        ("paged_adamw_32bit", {"strategy": "fsdp2"}, "adamw_torch_fused"),
        ("adafactor", {"strategy": "fsdp2"}, "adamw_torch_fused"),
        ("adamw_torch_8bit", {"strategy": "zero2"}, "adamw_bnb_8bit"),
        ("adamw_torch_4bit", {"strategy": "fsdp2"}, "adamw_torch_8bit"),
        ("sgd", {"strategy": "zero3", "offload_optimizer": True}, "without optimizer offload"),
        ("adamw_bnb_8bit", {"strategy": "zero2", "offload_optimizer": True}, "without optimizer offload"),
    ],
)
def test_refused_with_a_way_out(name, where, fix):
    with pytest.raises(ConfigError) as error:
        check_optimizer(name, **{"device_type": "cpu", **where})
    assert error.value.place == "--optim"
    assert fix in error.value.fix


def test_gradients_freed_in_the_backward_pass_cannot_be_clipped_or_accumulated():
    settings = {"device_type": "cuda", "optim_args": "offload_gradients=true"}
    assert check_optimizer("adamw_cpu_offload", **settings, max_grad_norm=0.0) == []
    for extra in ({"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 4}):
        with pytest.raises(ConfigError, match="clipped or accumulated"):
            check_optimizer("adamw_cpu_offload", **settings, **extra)


def test_what_the_user_should_know():
    assert "ordinary memory" in check_optimizer("paged_adamw_8bit", device_type="cpu")[0]
    assert check_optimizer("paged_adamw_8bit", device_type="cuda") == []
    assert "4 bytes" in check_optimizer("adafactor", device_type="cuda", strategy="zero2")[0]
    (note,) = check_optimizer("lion_32bit", device_type="cuda", strategy="zero2", offload_optimizer=True)
    assert "DeepSpeed CPU Lion in place of lion_32bit" in note


@pytest.fixture
def fresh_manager():
    """bitsandbytes has one record of exceptions for all optimizers of a process, by a parameter's position."""
    from bitsandbytes.optim import GlobalOptimManager

    yield
    GlobalOptimManager.get_instance().initialize()


@pytest.mark.usefixtures("fresh_manager")
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_keep_32_bit_states_as_in_the_plan(tied):
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    keep_embeddings_wide("adamw_bnb_8bit", model)
    optimizer = create_optimizer("adamw_bnb_8bit", list(model.parameters()), lr=1e-3)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    wide = {id(p) for p in model.parameters() if optimizer.state[p]["state1"].dtype is torch.float32 and p.dim() > 1}
    assert wide == {id(model.model.embed_tokens.weight)}
    facts = facts_from_config(config.to_dict(), name="llama")
    planned = sharding_bytes(facts, TrainingSetup(precision="fp32", optimizer="adamw_bnb_8bit")).optimizer_bytes
    norms = 5 * 64 * (8 - 2.03)  # smaller than 4,096 values: 32 bit, which plans leave out
    assert state_bytes(optimizer) == pytest.approx(planned + norms, rel=0.002)


def test_wide_embeddings_do_not_concern_other_optimizers():
    keep_embeddings_wide("adamw_torch_8bit", torch.nn.Embedding(2, 2))
    with pytest.raises(ConfigError):
        keep_embeddings_wide("adamm", torch.nn.Embedding(2, 2))


def test_sizes_that_blocks_do_not_divide():
    """The reason why ZeRO, whose flat shards have any size, refuses torchao's states but not bitsandbytes'."""
    for name, expected in (("adamw_torch_8bit", 8.0), ("adamw_bnb_8bit", 2.03)):
        flat = torch.nn.Parameter(torch.ones(64 * 256 + 32))
        optimizer = create_optimizer(name, [flat], lr=1e-3)
        flat.grad = torch.ones_like(flat)
        optimizer.step()
        assert state_bytes(optimizer) / flat.numel() == pytest.approx(expected, abs=0.01)


@pytest.mark.soak
def test_torchao_compiled_takes_the_same_steps():
    torch.compiler.set_stance("default")
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 64, bias=False)  # one shape, one compilation
    torch.manual_seed(1)
    eager = torch.nn.Linear(64, 64, bias=False)
    losses = []
    for chosen, stance in ((model, "default"), (eager, "force_eager")):
        torch.compiler.set_stance(stance)
        losses.append(steps(chosen, make("adamw_torch_8bit", chosen), 5))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deepspeed_cpu_adam_is_adamw():
    """DeepSpeed compiles this optimizer on first use."""
    model = mlp()
    optimizer = make("deepspeed_cpu_adam", model, weight_decay=0.1)
    reference_model = mlp()
    reference = make("adamw_torch", reference_model, weight_decay=0.1)
    assert steps(model, optimizer, 20) == pytest.approx(steps(reference_model, reference, 20), rel=1e-4)
    assert state_bytes(optimizer) == 8 * sum(p.numel() for p in model.parameters())
    assert state_bytes_per_parameter("deepspeed_cpu_adam", weight_bytes=2) == 8


def test_deepspeed_cpu_adam_inside_zero_offload_is_left_to_accelerate():
    """Accelerate turns only torch's AdamW into DeepSpeed CPU Adam in AdamW mode."""
    cls, kwargs = optimizer_cls_and_kwargs(
        "deepspeed_cpu_adam", training_args(), device_type="cuda", strategy="zero3", offload_optimizer=True
    )
    assert cls is torch.optim.AdamW
    assert (kwargs["weight_decay"], kwargs["betas"]) == (0.1, (0.9, 0.95))


@pytest.fixture
def pretended_accelerator(monkeypatch):
    """Fake an accelerator's streams and pinned memory on the CPU: torchao's offload needs a device that has them."""

    class Stream:
        def wait_stream(self, other):
            pass

        def record_event(self):
            return types.SimpleNamespace(synchronize=lambda: None)

        def synchronize(self):
            pass

    streams = {"Stream": Stream, "current_stream": Stream, "stream": lambda stream: contextlib.nullcontext()}
    for name, value in streams.items():
        monkeypatch.setattr(torch.xpu, name, value)
    monkeypatch.setattr("torchao.optim.cpu_offload.get_available_devices", lambda: ["cpu", "xpu"])
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, pin_memory=False, **kwargs: empty_like(*args, **kwargs))


class TestCpuOffload:
    """The logic around torchao's transfers; a test below runs the transfers themselves on a GPU."""

    def run(self, model, optimizer, schedule=None, num_steps=5, max_norm=0.05, accumulate=2):
        inputs, targets = problem()
        losses = []
        for _ in range(num_steps):
            for part, target in zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True):
                loss = (model(part) - target).pow(2).mean() / accumulate
                loss.backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        return losses

    def offloaded(self, model, **kwargs):
        from accel_scale.optimization.offload_optimizer import offload_optimizer_class

        return offload_optimizer_class()(model.parameters(), lr=1e-2, weight_decay=0.1, **kwargs)

    def test_clipping_and_accumulation_reach_the_step(self, pretended_accelerator):
        from torchao.optim import CPUOffloadOptimizer

        reference = mlp()
        expected = self.run(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1))
        model = mlp()
        assert self.run(model, self.offloaded(model)) == pytest.approx(expected, rel=1e-5)
        # torchao's own steps, on gradients from before clipping. (Adam forgives a constant factor; the difference
        # is the weight of each step's gradient in the moments.)
        plain = mlp()
        theirs = CPUOffloadOptimizer(plain.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
        assert self.run(plain, theirs) != pytest.approx(expected, rel=1e-5)

    def test_schedules_and_resuming(self, pretended_accelerator):
        from accel_scale.optimization.schedules import create_schedule

        def schedule_of(optimizer):
            return create_schedule(optimizer, "linear", num_training_steps=10)

        reference = mlp()
        adamw = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
        expected = self.run(reference, adamw, schedule_of(adamw), num_steps=6)
        model = mlp()
        optimizer = self.offloaded(model)
        schedule = schedule_of(optimizer)
        first = self.run(model, optimizer, schedule, num_steps=3)
        file = io.BytesIO()
        torch.save((optimizer.state_dict(), schedule.state_dict(), model.state_dict()), file)
        file.seek(0)
        optimizer_state, schedule_state, weights = torch.load(file, weights_only=True)
        resumed_model = mlp()
        resumed_model.load_state_dict(weights)
        resumed = self.offloaded(resumed_model)
        resumed_schedule = schedule_of(resumed)
        resumed.load_state_dict(optimizer_state)
        resumed_schedule.load_state_dict(schedule_state)
        second = self.run(resumed_model, resumed, resumed_schedule, num_steps=3)
        assert first + second == pytest.approx(expected, rel=1e-5)

    def test_states_are_those_of_adamw(self, pretended_accelerator):
        model = mlp()
        optimizer = self.offloaded(model)
        self.run(model, optimizer, num_steps=1)
        num_parameters = sum(p.numel() for p in model.parameters())
        assert state_bytes(optimizer) == num_parameters * state_bytes_per_parameter("adamw_cpu_offload")
        assert optimizer.defaults == {"lr": 1e-2, "weight_decay": 0.1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cpu_offload_on_a_card_follows_adamw_and_frees_its_states():
    losses, state_device = {}, set()
    for name in ("adamw_torch", "adamw_cpu_offload"):
        model = mlp().cuda()
        optimizer = make(name, model, device_type="cuda", weight_decay=0.1)
        inputs, targets = (tensor.cuda() for tensor in problem())
        losses[name] = []
        for _ in range(20):
            loss = (model(inputs) - targets).pow(2).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
        state_device = {v.device.type for s in optimizer.state.values() for v in s.values() if v.dim()}
    assert losses["adamw_cpu_offload"] == pytest.approx(losses["adamw_torch"], rel=1e-4)
    assert state_device == {"cpu"}


@pytest.fixture(scope="module")
def process_group():
    """A process group of one, which is enough to turn FSDP2's parameters into DTensors."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [n for n in RUNNABLE if n != "adamw_torch_4bit"])
def test_fsdp2_works_or_is_refused_for_a_reason(name, process_group):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(mlp())
    optimizer = make(name, model)
    if "fsdp" in OPTIMIZERS[name].refused:
        with pytest.raises((RuntimeError, NotImplementedError), match=r"DTensor|sharding strategy"):
            steps(model, optimizer, 1)
        return
    assert steps(model, optimizer, 20) == pytest.approx(trajectory(name), rel=1e-5)
