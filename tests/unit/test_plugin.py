"""`ScalePlugin`: its fields, what it refuses, and how it changes models, optimizers and schedules."""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, RLOOConfig, SFTConfig, SFTTrainer

from accel_scale.ending.out_of_memory import smaller_batch_advice
from accel_scale.errors import ConfigError
from accel_scale.plugin.field_words import in_words_of_fields
from accel_scale.plugin.plugin import ScalePlugin
from accel_scale.plugin.trainer_arguments import adapt_arguments


@pytest.fixture(autouse=True)
def _fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def tiny(**overrides) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **overrides}))


def parts(model, *, batch_size: int = 2, lr: float = 1e-3):
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": lr / 10},
        ],
        lr=lr,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)  # starts at zero
    loader = DataLoader(torch.arange(64).view(8, 8), batch_size=batch_size)
    return model, optimizer, loader, scheduler


def prepared(plugin: ScalePlugin, model=None, **settings):
    accelerator = plugin.accelerator(cpu=True)
    return accelerator, *accelerator.prepare(*parts(model or tiny(), **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "bf17"}, r"ScalePlugin\(precision=\): 'bf17' is unknown"),
        ({"checkpointing_policy": "all"}, r"ScalePlugin\(checkpointing_policy=\)"),
        ({"optimizer": "adamw_8bits"}, "adamw_8bits"),
        ({"lr_schedule": "wds"}, r"ScalePlugin\(lr_schedule=\): 'wds' is unknown"),
        ({"lr_schedule": "wsd", "warmup_ratio": 3}, "3 is not a share"),
        ({"global_batch_size": 0}, "0 is too small"),
        ({"device_memory": "much"}, "not an amount of memory"),
        ({"warmup_ratio": 0.1}, "warmup_ratio does nothing without lr_schedule"),
        ({"optim_args": "momentum=0.9"}, "optim_args does nothing without optimizer"),
        ({"fp8_emulate": True}, "fp8_emulate does nothing without precision"),
        ({"fp8_emulate": True, "precision": "bf16"}, "fp8_emulate does nothing with bf16"),
        ({"decay_ratio": 0.2, "lr_schedule": "cosine"}, "decay_ratio does nothing with cosine"),
        ({"guard_max_skips": 3, "guard": "off"}, "guard_max_skips does nothing with guard off"),
        ({"attention": "flash"}, r"ScalePlugin\(attention=\): 'flash' is unknown. Fix: use eager, sdpa"),
        ({"optimizer": "sgd", "optim_args": "speed=1"}, r"ScalePlugin\(optim_args=\): sgd has no option 'speed'"),
        ({"lr_schedule": "constant", "min_lr_ratio": 0.1}, r"ScalePlugin\(min_lr_ratio=\): min_lr_ratio=0.1 does not"),
        (
            {"lr_schedule": "wsd", "warmup_ratio": 0.6, "decay_ratio": 0.6},
            r"ScalePlugin\(decay_ratio=\): warmup_ratio=0.6 and decay_ratio=0.6 add up to more than the run",
        ),
    ],
)
def test_bad_settings_are_refused_when_the_plugin_is_made(settings, message):
    with pytest.raises(ConfigError, match=message):
        ScalePlugin(**settings)


def test_messages_never_name_a_flag():
    """Messages of code shared with the recipes name the plugin's fields instead of flags."""
    names = {field.name for field in fields(ScalePlugin)}
    rooms = ("flags", "modeling", "optimization", "plugin", "settings", "training")
    package = Path(__file__).parents[2] / "accel_scale"
    sources = [path.read_text() for room in rooms for path in (package / room).rglob("*.py")]
    texts = {text for source in sources for text in re.findall(r'"([^"\n]*--[a-z_]+[^"\n]*)"', source)}
    assert len(texts) > 100
    assert not [text for text in texts if re.search(r"--[a-z]", in_words_of_fields(text, names))]
    expected = {
        "use --optim adamw_bnb_8bit, whose states have 8 bits at any size.": 'use optimizer="adamw_bnb_8bit", whose ',
        "set --precision bf16, or ": 'set precision="bf16", or ',
        "use --precision bf16.": 'use precision="bf16".',
        "remove it or use --lr_scheduler_type cosine.": 'remove it or use lr_schedule="cosine".',
        "a shorter --max_length, --method lora or qlora, or": "a shorter max_length, an adapter, or",
    }
    for text, begin in expected.items():
        assert in_words_of_fields(text, names).startswith(begin)


def test_advice_of_a_trainer_that_runs_out_of_memory_names_what_a_script_has():
    trainer = object.__new__(ScalePlugin().trainer(Trainer))
    assert trainer.in_user_words(smaller_batch_advice(4, 2)).startswith(
        "run again with per_device_train_batch_size=2 gradient_accumulation_steps=4 "
    )


def test_a_kernel_by_its_name_is_an_attention():
    assert ScalePlugin(attention="kernels-community/flash-attn3").attention is not None


def test_fields_fall_back_on_the_environment(monkeypatch):
    monkeypatch.setenv("ACCEL_SCALE_PRECISION", "bf16_true")
    monkeypatch.setenv("ACCEL_SCALE_GLOBAL_BATCH_SIZE", "64")
    monkeypatch.setenv("ACCEL_SCALE_LR_SCHEDULE", "wsd")
    monkeypatch.setenv("ACCEL_SCALE_MIN_LR_RATIO", "0.25")
    monkeypatch.setenv("ACCEL_SCALE_VERIFY_FIRST_CHECKPOINT", "off")
    plugin = ScalePlugin(global_batch_size=8)
    assert (plugin.precision, plugin.global_batch_size, plugin.min_lr_ratio) == ("bf16_true", 8, 0.25)
    assert plugin.lr_schedule == "warmup_stable_decay"
    assert plugin.verify_first_checkpoint is False


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GLOBAL_BATCH_SIZE", "many", "ACCEL_SCALE_GLOBAL_BATCH_SIZE: 'many' is not a whole number"),
        ("FP8_EMULATE", "maybe", "ACCEL_SCALE_FP8_EMULATE: 'maybe' is not true or false"),
        ("PRECISION", "fp12", "ACCEL_SCALE_PRECISION: 'fp12' is unknown"),
    ],
)
def test_errors_name_the_environment_variable(monkeypatch, name, value, message):
    monkeypatch.setenv(f"ACCEL_SCALE_{name}", value)
    with pytest.raises(ConfigError, match=message):
        ScalePlugin()


def test_a_plugin_without_settings_changes_nothing():
    model = tiny()
    reference = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator, got, optimizer, _, scheduler = prepared(ScalePlugin(), model)
    assert got is model
    assert type(optimizer.optimizer) is torch.optim.AdamW
    assert scheduler.split_batches is False
    assert accelerator.gradient_accumulation_steps == 1
    assert accelerator.mixed_precision == "no"
    assert not model.is_activation_checkpointing
    assert all(torch.equal(value, reference[name]) for name, value in model.state_dict().items())


def test_optimizer_takes_over_groups_and_peak_learning_rates():
    plugin = ScalePlugin(optimizer="sgd_momentum", weight_decay=0.5)
    _, model, optimizer, _, _ = prepared(plugin)
    assert type(optimizer.optimizer) is torch.optim.SGD
    peaks = [(group["initial_lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert peaks == [(1e-3, 0.5), (1e-4, 0.0)]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


def test_schedule_is_counted_in_optimizer_steps():
    plugin = ScalePlugin(
        lr_schedule="wsd",
        num_training_steps=4,
        warmup_ratio=0.5,
        decay_ratio=0.5,
        decay_shape="linear",
        min_lr_ratio=0.2,
        global_batch_size=4,
    )
    accelerator, model, optimizer, loader, scheduler = prepared(plugin, batch_size=1)
    assert accelerator.gradient_accumulation_steps == 4
    rates = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    # Eight micro-batches are two steps: half the peak, then the peak; after that the decay begins.
    assert rates == pytest.approx([0.5e-3] * 4 + [1e-3] * 4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.6e-3)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.6e-4)


def test_learning_rate_scales_with_the_global_batch():
    plugin = ScalePlugin(
        scale_lr_from_batch_size="sqrt", lr_base_batch_size=2, global_batch_size=8, learning_rate=1e-2
    )
    _, _, optimizer, _, scheduler = prepared(plugin)
    scheduler.scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2e-2 / 100)  # the script's schedule, up to the new peak


def test_adapter_is_trained_and_the_base_is_not():
    plugin = ScalePlugin(
        adapter=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        optimizer="adamw_torch",
        checkpointing_policy="full",
    )
    accelerator, model, optimizer, loader, scheduler = prepared(plugin)
    assert isinstance(model, PeftModel)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    for batch in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert len(changed) == 4
    assert all("lora_" in name for name in changed)


@pytest.mark.parametrize(
    ("precision", "trained", "mixed"),
    [("bf16_true", torch.bfloat16, "no"), ("bf16", torch.float32, "bf16"), ("fp32", torch.float32, "no")],
)
def test_precision_sets_weights_and_autocast(precision, trained, mixed):
    accelerator, model, _, loader, _ = prepared(ScalePlugin(precision=precision), tiny().half())
    assert accelerator.mixed_precision == mixed
    assert {parameter.dtype for parameter in model.parameters()} == {trained}
    seen = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model(input_ids=next(iter(loader)))
    assert seen == [torch.float32 if precision == "fp32" else torch.bfloat16]


def test_fp8_converts_the_inner_layers():
    pytest.importorskip("torchao")
    plugin = ScalePlugin(precision="fp8", fp8_emulate=True)
    accelerator, model, optimizer, loader, _ = prepared(plugin)
    kinds = {type(module).__name__ for module in model.modules()}
    assert "Float8Linear" in kinds
    accelerator.backward(model(input_ids=next(iter(loader)), labels=next(iter(loader))).loss)
    optimizer.step()


def test_contradictions_with_the_script_are_refused():
    with pytest.raises(ConfigError, match="mixed_precision='fp16' and precision bf16 contradict"):
        ScalePlugin(precision="bf16").accelerator(cpu=True, mixed_precision="fp16")
    with pytest.raises(ConfigError, match="derived from global_batch_size"):
        ScalePlugin(global_batch_size=8).accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="cannot be split into micro-batches of 2"):
        prepared(ScalePlugin(global_batch_size=3))
    with pytest.raises(ConfigError, match="does not say how many optimizer steps"):
        prepared(ScalePlugin(lr_schedule="cosine"))
    with pytest.raises(ConfigError, match="no optimizer was given to prepare"):
        ScalePlugin(optimizer="sgd").accelerator(cpu=True).prepare(tiny())
    with pytest.raises(ConfigError, match="holds the weights that the adapter freezes"):
        prepared(ScalePlugin(adapter=LoraConfig(r=2, target_modules=["q_proj"])))


def test_prepare_works_on_an_accelerator_of_ones_own():
    accelerator = Accelerator(cpu=True)
    plugin = ScalePlugin(optimizer="adagrad")
    _, optimizer, _, _ = plugin.prepare(accelerator, *parts(tiny()))
    assert type(optimizer.optimizer) is torch.optim.Adagrad


def test_a_launch_that_fell_apart_is_noticed(monkeypatch):
    """Two processes and an accelerator created before the plugin: each rank believes that it is alone."""
    plugin = ScalePlugin()
    monkeypatch.setattr(plugin, "launch", type(plugin.launch)(plugin.launch.parallel, None, 2, 2, 0, 0))
    with pytest.raises(ConfigError, match="2 processes, but each believes it is alone"):
        plugin.accelerator(cpu=True)


def bare(**loader):
    """A loop without anything that most fields change."""
    model = torch.nn.Linear(8, 8)
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(torch.ones(8, 8), **{"batch_size": 2, **loader}),
    )


REFUSED_IN_LOOPS = {
    "learning_rate, no optimizer": ({"learning_rate": 1e-3}, lambda: bare()[:1], "nothing to replace: no optimizer"),
    "weight_decay for nobody": ({"weight_decay": 0.1}, bare, "no parameter group of the script decays"),
    "scaling, no loader": ({"scale_lr_from_batch_size": "sqrt"}, lambda: bare()[:2], "the global batch is not known"),
    "scaling, no batch size": (
        {"scale_lr_from_batch_size": "sqrt"},
        lambda: bare(batch_size=None),
        "the global batch is not known",
    ),
    "guard": ({"guard": "skip"}, bare, "in a plain loop the guard stands where the optimizer steps"),
    "metric": ({"lr_schedule": "greedy", "num_training_steps": 4}, bare, "follows a metric"),
    "schedule, no scheduler": (
        {"lr_schedule": "cosine", "num_training_steps": 4},
        bare,
        "nothing to replace: no learning-rate scheduler",
    ),
    "scheduler, no optimizer": (
        {"lr_schedule": "cosine", "num_training_steps": 4},
        lambda: (torch.nn.Linear(1, 1), torch.optim.lr_scheduler.StepLR(bare()[1], 2)),
        "without its optimizer",
    ),
    "attention of another model": ({"attention": "sdpa"}, bare, "not a transformers model"),
    "checkpointing without blocks": ({"checkpointing_policy": "full"}, bare, "checkpoint"),
    "adapter on two models": (
        {"adapter": LoraConfig(r=2, target_modules=["q_proj"]), "optimizer": "sgd"},
        lambda: (*bare(), *bare()[:2]),
        "which of several models or optimizers",
    ),
    "device memory": ({"device_memory": "1GiB"}, bare, "cannot be capped"),
}


@pytest.mark.parametrize("own", [False, True], ids=["plugin's accelerator", "own accelerator"])
@pytest.mark.parametrize("case", list(REFUSED_IN_LOOPS))
def test_a_field_that_would_do_nothing_in_a_loop_is_refused(case, own):
    settings, make, message = REFUSED_IN_LOOPS[case]

    def run() -> None:
        plugin = ScalePlugin(**settings)
        accelerator = Accelerator(cpu=True) if own else plugin.accelerator(cpu=True)
        plugin.prepare(accelerator, *make())

    with pytest.raises(ConfigError, match=message):
        run()


@pytest.mark.parametrize("own", [False, True], ids=["plugin's accelerator", "own accelerator"])
def test_a_global_batch_needs_a_loop_that_accumulates(own):
    plugin = ScalePlugin(global_batch_size=4)

    def loop(accumulate: bool, **loader) -> int:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True) if own else plugin.accelerator(cpu=True)
        model, optimizer, batches = plugin.prepare(accelerator, *bare(**loader))
        steps = 0
        for batch in batches:
            with accelerator.accumulate(model) if accumulate else nullcontext():
                accelerator.backward(model(batch).sum())
                steps += accelerator.sync_gradients
                optimizer.step()
                optimizer.zero_grad()
        return steps

    assert loop(True) == 2
    with pytest.raises(ConfigError, match="takes a step with every micro-batch, not with 2"):
        loop(False)
    assert loop(False, batch_size=4) == 2
    with pytest.raises(ConfigError, match="set micro_batch_size"):
        loop(True, batch_size=None)


def test_an_accelerator_of_ones_own_computes_as_the_plugin_says():
    with pytest.raises(ConfigError, match="Accelerator computes in 'no', precision bf16 in 'bf16'"):
        ScalePlugin(precision="bf16").prepare(Accelerator(cpu=True), *bare())
    with pytest.raises(ConfigError, match="accumulates 3 micro-batches, global_batch_size 4 means 2"):
        ScalePlugin(global_batch_size=4).prepare(Accelerator(cpu=True, gradient_accumulation_steps=3), *bare())


def test_an_evaluation_loader_does_not_set_the_global_batch():
    plugin = ScalePlugin(global_batch_size=8)
    accelerator = plugin.accelerator(cpu=True)
    accelerator.prepare(*bare())
    accelerator.prepare(DataLoader(torch.ones(8, 8), batch_size=8))
    assert accelerator.gradient_accumulation_steps == 4


@pytest.mark.parametrize(
    ("num_steps", "said"), [(2, "has ended, and training continues"), (4, ""), (9, "after 4 of the")]
)
def test_a_schedule_of_another_length_than_training_is_said(num_steps, said, capsys):
    plugin = ScalePlugin(lr_schedule="linear", num_training_steps=num_steps)
    accelerator = plugin.accelerator(cpu=True)
    made = bare()
    model, optimizer, loader, scheduler = accelerator.prepare(*made, torch.optim.lr_scheduler.StepLR(made[1], 2))
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        scheduler.step()
    accelerator.end_training()
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == bool(said)
    assert all(said in line for line in warnings)


SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
}


def token_rows() -> list[dict]:
    return [{"input_ids": list(range(k, k + 8)), "labels": list(range(k, k + 8))} for k in range(3, 19)]


def test_hf_trainer_with_an_adapter(tmp_path):
    plugin = ScalePlugin(
        adapter=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        optimizer="adamw_torch_foreach",
        precision="bf16",
        lr_schedule="linear",
        min_lr_ratio=0.5,
        learning_rate=1e-2,
    )
    args = TrainingArguments(output_dir=str(tmp_path), logging_steps=1, **SETTINGS)
    trainer = plugin.trainer(Trainer)(model=tiny(), args=args, train_dataset=token_rows())
    trainer.train()
    assert isinstance(trainer.model, PeftModel)
    assert trainer.accelerator.mixed_precision == "bf16"
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([1e-2, 0.75e-2])
    trainer.save_model()
    assert trainer.first_verification.source == "adapter_model.safetensors"
    assert (tmp_path / "adapter_model.safetensors").is_file()


def _tokenizer(shared_data):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / "stories260k")


def test_trl_sft_trainer(tmp_path, shared_data):
    plugin = ScalePlugin(optimizer="adamw_bnb_8bit", checkpointing_policy="every_2", lr_schedule="cosine")
    args = SFTConfig(output_dir=str(tmp_path), bf16=False, **SETTINGS)
    trainer = plugin.trainer(SFTTrainer)(
        model=str(shared_data / "stories260k"),
        args=args,
        train_dataset=_dataset([{"text": "Once upon a time, there was a little girl."}] * 8),
    )
    trainer.train()
    assert type(trainer.optimizer.optimizer).__module__.startswith("bitsandbytes")
    assert trainer.first_verification.max_abs_diff == 0.0
    layers = trainer.model.model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, True, False, True]


@pytest.mark.slow
def test_trl_dpo_trainer(tmp_path, shared_data):
    plugin = ScalePlugin(optimizer="adamw_bnb_8bit", lr_schedule="wsd", checkpointing_policy="full")
    args = DPOConfig(output_dir=str(tmp_path), bf16=False, **SETTINGS)
    row = {"prompt": "Once upon a time", "chosen": ", there was a girl.", "rejected": " no no no no"}
    trainer = plugin.trainer(DPOTrainer)(
        model=str(shared_data / "stories260k"),
        args=args,
        train_dataset=_dataset([row] * 8),
        processing_class=_tokenizer(shared_data),
    )
    trainer.train()
    assert type(trainer.optimizer.optimizer).__module__.startswith("bitsandbytes")
    assert trainer.first_verification.max_abs_diff == 0.0


def _dataset(rows):
    from datasets import Dataset

    return Dataset.from_list(rows)


@pytest.mark.parametrize(("kind", "is_refused"), [("FULL_STATE_DICT", True), ("SHARDED_STATE_DICT", False)])
def test_whole_checkpoints_of_quantised_states_are_refused(tmp_path, kind, is_refused):
    """Only what the launch says matters here; rehearsals show that the other layouts resume."""
    from accel_scale.launching.environment import current_launch

    fsdp2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "1", "FSDP_STATE_DICT_TYPE": kind}
    expected = pytest.raises(ConfigError, match="SHARDED_STATE_DICT") if is_refused else nullcontext()
    plugin = ScalePlugin(optimizer="adamw_torch_8bit")
    accelerator, *_ = prepared(plugin)
    plugin.launch = current_launch(fsdp2)
    with expected:
        accelerator.save_state(str(tmp_path / "state"))
    assert (tmp_path / "state").is_dir() is not is_refused
    AcceleratorState._reset_state(reset_partial_state=True)
    args = TrainingArguments(str(tmp_path / "out"), use_cpu=True, save_strategy="steps", report_to=[])
    with expected:
        plugin.trainer(Trainer)(model=tiny(), args=args)
    args.save_strategy = "no"
    plugin.trainer(Trainer)(model=tiny(), args=args)


@pytest.mark.parametrize(
    ("given", "settings", "expected"),
    [
        ({}, {"global_batch_size": 8}, (8, 4)),
        ({}, {"micro_batch_size": 4}, (4, 1)),
        ({"steps_per_generation": 4}, {"global_batch_size": 4}, (8, 4)),  # chosen to keep the number of completions
        ({"generation_batch_size": 8}, {"micro_batch_size": 4}, (8, 2)),
        ({"generation_batch_size": 6}, {"micro_batch_size": 4}, "is not a multiple of 4"),
        ({"num_generations": 8, "generation_batch_size": 8}, {"micro_batch_size": 8}, (8, 1)),
        ({}, {"micro_batch_size": 3}, "not a multiple of num_generations 2"),
    ],
)
@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_batches_for_generation_follow_the_plugins(config, given, settings, expected, tmp_path):
    arguments = config(str(tmp_path), **{"num_generations": 2, "bf16": False, **SETTINGS, **given})
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            adapt_arguments(ScalePlugin(**settings), arguments)
        return
    adapt_arguments(ScalePlugin(**settings), arguments)
    assert (arguments.generation_batch_size, arguments.steps_per_generation) == expected
    assert arguments.generation_batch_size == arguments.per_device_train_batch_size * arguments.steps_per_generation


def test_other_names_of_what_is_derived_have_not_appeared():
    """Only known fields of TRL's configurations are derived from the batch by their own `__post_init__`."""
    import trl

    found = set()
    for name in dir(trl):
        config = getattr(trl, name) if name.endswith("Config") else None
        if isinstance(config, type) and issubclass(config, TrainingArguments):
            source = inspect.getsource(config.__post_init__)
            found |= set(re.findall(r"self\.(\w+) = [^=\n]*(?:per_device_train_batch|gradient_accumulation)", source))
    assert found == {"generation_batch_size", "steps_per_generation"}


def test_what_is_no_trainer_is_refused():
    with pytest.raises(ConfigError, match="SFTConfig is not a trainer of transformers or TRL"):
        ScalePlugin().trainer(SFTConfig)
