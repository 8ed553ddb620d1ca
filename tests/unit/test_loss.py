"""Chunked cross-entropy equals the full one; losses are weighted by tokens; the lean trainer loss equals TRL's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from activation_memory import peak_tensor_bytes
from datasets import Dataset
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from accel_scale.errors import ConfigError
from accel_scale.optimization import loss as loss_module
from accel_scale.optimization.fast_loss import FastLossMixin
from accel_scale.optimization.head_loss import head_transform
from accel_scale.optimization.loss import chunked_cross_entropy, count_loss_tokens

VOCAB, HIDDEN = 101, 32


def head_inputs(dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(0, VOCAB, (3, 40), generator=generator)
    labels[0, :25] = -100
    labels[2, 7] = -100
    return draw(3, 40, HIDDEN), draw(VOCAB, HIDDEN), draw(VOCAB), labels


def full_cross_entropy(hidden, weight, labels, bias=None, softcap=None, logit_scale=1.0, shift=True):
    logits = nn.functional.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("head_grad_bytes", [0, 2**30], ids=["head_grad_later", "head_grad_in_forward"])
@pytest.mark.parametrize("chunk_size", [1, 13, 1000, None])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True}, {"softcap": 3.0}, {"logit_scale": 0.25}, {"softcap": 2.0, "logit_scale": 0.5, "bias": True}],
)
def test_chunked_cross_entropy_equals_the_full_one(options, chunk_size, head_grad_bytes, monkeypatch):
    monkeypatch.setattr(loss_module, "HEAD_GRAD_IN_FORWARD_BYTES", head_grad_bytes)
    hidden, weight, bias, labels = head_inputs(torch.float32)
    options = {**options, "bias": bias if options.get("bias") else None}
    inputs = [hidden, weight] + ([bias] if options["bias"] is not None else [])
    expected = full_cross_entropy(hidden, weight, labels, **options) / 17
    expected_grads = torch.autograd.grad(expected, inputs)
    actual = chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk_size, num_items=17, **options)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(torch.autograd.grad(actual, inputs), expected_grads, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_divisor_shift_and_accuracy():
    hidden, weight, _, labels = head_inputs(torch.float32)
    assert count_loss_tokens(labels) == 3 * 39 - 24 - 1
    loss, num_correct = chunked_cross_entropy(hidden, weight, labels, return_num_correct=True)
    assert loss.item() == pytest.approx(full_cross_entropy(hidden, weight, labels).item() / 92, rel=1e-6)
    predicted = (hidden @ weight.t())[:, :-1].argmax(-1)
    assert num_correct == (predicted == labels[:, 1:]).sum()
    unshifted = chunked_cross_entropy(hidden, weight, labels, shift=False, num_items=1)
    assert unshifted.item() == pytest.approx(full_cross_entropy(hidden, weight, labels, shift=False).item(), rel=1e-6)
    with pytest.raises(ConfigError, match="not positive"):
        chunked_cross_entropy(hidden, weight, labels, chunk_size=0)


def test_a_number_of_labels_that_is_not_theirs_is_never_a_loss():
    hidden, weight, _, labels = head_inputs()
    counted = int((labels[:, 1:] != -100).sum())
    expected = chunked_cross_entropy(hidden, weight, labels)
    assert torch.equal(chunked_cross_entropy(hidden, weight, labels, num_labels=counted), expected)
    for wrong in (0, counted - 1, counted + 1, labels[:, 1:].numel()):
        assert chunked_cross_entropy(hidden, weight, labels, num_labels=wrong).isnan(), wrong


def test_no_labelled_token_is_a_differentiable_zero():
    hidden, weight, _, labels = head_inputs(torch.float32)
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.abs().sum() == 0
    assert weight.grad.abs().sum() == 0


def test_a_frozen_head_and_a_second_backward():
    hidden, weight, _, labels = head_inputs(torch.float32)
    loss = chunked_cross_entropy(hidden, weight.detach(), labels)
    loss.backward(retain_graph=True)
    assert hidden.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="used up"):
        loss.backward()


def test_autocast_computes_in_its_type():
    hidden, weight, _, labels = head_inputs(torch.float32)
    exact = full_cross_entropy(hidden, weight, labels) / 92
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss.dtype == weight.grad.dtype == hidden.grad.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)
    assert loss.item() != exact.item()
    expected = torch.autograd.grad(exact, [hidden, weight])
    for ours, theirs in zip((hidden.grad, weight.grad), expected, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 0.01


def test_peak_memory_is_that_of_a_chunk():
    tokens, vocab = 512, 4096
    hidden = torch.randn(1, tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocab, HIDDEN, requires_grad=True)
    labels = torch.randint(0, vocab, (1, tokens))
    logits_bytes = tokens * vocab * 4

    def full() -> None:
        full_cross_entropy(hidden, weight, labels).backward()

    def chunked() -> None:
        chunked_cross_entropy(hidden, weight, labels, chunk_size=32).backward()

    gradients_bytes = 4 * (hidden.numel() + weight.numel())
    assert peak_tensor_bytes(full) > 1.9 * logits_bytes
    # A chunk's logits, log-softmax, gradient and one temporary; then the gradients and a chunk's share of them.
    assert peak_tensor_bytes(chunked) < 4 * logits_bytes / 16 + 3 * gradients_bytes
    assert peak_tensor_bytes(chunked) < 0.25 * peak_tensor_bytes(full)


def test_head_transforms_are_read_from_the_configuration():
    from transformers import CohereConfig, Gemma2Config, GraniteConfig

    assert head_transform(LlamaConfig()) == (None, 1.0)
    assert head_transform(Gemma2Config()) == (30.0, 1.0)
    assert head_transform(GraniteConfig(logits_scaling=8.0)) == (None, 0.125)
    assert head_transform(CohereConfig(logit_scale=0.0625)) == (None, 0.0625)


# -------------------------------------------------------------------------------------------------------- trainers


class FastTrainer(FastLossMixin, SFTTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    vocab = {f"t{i}": i for i in range(VOCAB - 2)} | {"<pad>": VOCAB - 2, "<eos>": VOCAB - 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="t0")), pad_token="<pad>", eos_token="<eos>"
    )


def rows(num_rows: int = 8) -> Dataset:
    """Rows of very different lengths; some of their tokens have no label."""
    generator = torch.Generator().manual_seed(5)
    lengths = [3, 60, 5, 9, 40, 4, 7, 30][:num_rows]
    ids = [torch.randint(0, VOCAB - 2, (n,), generator=generator).tolist() for n in lengths]
    labels = [[-100, *row[1:]] if i % 2 else row for i, row in enumerate(ids)]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def train(trainer_class, tmp_path, model=None, dataset=None, **overrides):
    torch.manual_seed(0)
    if model is None:
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = LlamaForCausalLM(config)
    settings = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 8,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "bf16": False,
        "save_strategy": "no",
        "use_cpu": True,
        "shuffle_dataset": False,
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
    }
    trainer = trainer_class(
        model=model,
        args=SFTConfig(**{**settings, **overrides}),
        train_dataset=rows() if dataset is None else dataset,
        eval_dataset=rows(4),
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def logged(trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.slow
@pytest.mark.parametrize("trainer_class", [SFTTrainer, FastTrainer])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_unequal_micro_batches_weigh_as_one_batch(trainer_class, micro_batch, tmp_path):
    one = train(trainer_class, tmp_path)
    many = train(
        trainer_class,
        tmp_path,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=8 // micro_batch,
    )
    assert logged(many, "loss")[0] == pytest.approx(logged(one, "loss")[0], rel=1e-6)
    assert torch.allclose(weights(many), weights(one), rtol=0, atol=1e-7)
    # The sum of unweighted micro-batch means would have moved the weights elsewhere: row lengths differ 20-fold.
    assert (weights(one) - weights(train(trainer_class, tmp_path, learning_rate=0.0))).abs().max() > 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow, id="padded"),
        pytest.param({"packing": True, "max_length": 64}, marks=pytest.mark.slow, id="packed"),
        pytest.param({"bf16": True}, marks=pytest.mark.slow, id="bf16"),
        pytest.param({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, id="accumulated"),
    ],
)
def test_the_lean_loss_equals_trls(settings, tmp_path):
    settings = {"max_steps": 4, "optim": "adamw_torch_fused", "learning_rate": 1e-3, **settings}
    theirs, ours = (train(cls, tmp_path, **settings) for cls in (SFTTrainer, FastTrainer))
    assert len(logged(ours, "loss")) == 4
    tolerance = 2e-3 if settings.get("bf16") else 1e-6
    for key in ("loss", "grad_norm", "num_tokens"):
        assert logged(ours, key) == pytest.approx(
            logged(theirs, key), rel=10 * tolerance if key == "grad_norm" else tolerance
        )
    ours_eval, theirs_eval = ours.evaluate(), theirs.evaluate()
    for key in ("eval_loss", "eval_mean_token_accuracy"):
        assert ours_eval[key] == pytest.approx(theirs_eval[key], rel=5 * tolerance), key
    assert not logged(ours, "mean_token_accuracy")
    assert not logged(ours, "entropy")


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"args.loss_type": "dft"},
        {"label_smoother": "set"},
        {"compute_loss_func": print},
        {"_is_vision_dataset": True},
        {"accelerator.parallelism_config": SimpleNamespace(sp_enabled=True, cp_enabled=False)},
        {"accelerator.parallelism_config": SimpleNamespace(sp_enabled=False, cp_enabled=True)},
        {"accelerator.parallelism_config": SimpleNamespace(sp_enabled=False, cp_enabled=False), "is_covered": True},
        {"model.active_peft_config": SimpleNamespace(is_prompt_learning=True)},
        {"model.active_peft_config": SimpleNamespace(is_prompt_learning=False), "is_covered": True},
        {"aux_loss_enabled": True, "is_covered": True},
        {"aux_loss_enabled": True, "sp_size": 2},
        {"sp_size": 2, "is_covered": True},
    ],
    ids=str,
)
def test_what_the_lean_loss_covers(other):
    other = dict(other)
    is_covered = other.pop("is_covered", not other)
    trainer = SimpleNamespace(
        args=SimpleNamespace(loss_type="nll"), accelerator=SimpleNamespace(parallelism_config=None),
        model=SimpleNamespace(), label_smoother=None, compute_loss_func=None, aux_loss_enabled=False, sp_size=1,
        _is_vision_dataset=False,
    )  # fmt: skip
    for name, value in other.items():
        *owners, last = name.split(".")
        setattr(getattr(trainer, owners[0]) if owners else trainer, last, value)
    assert FastLossMixin._covers_run(trainer) == is_covered


def test_adapters_train_with_the_lean_loss(tmp_path):
    from peft import LoraConfig

    class WithAdapter(FastTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, peft_config=LoraConfig(r=4, target_modules="all-linear"), **kwargs)

    trainer = train(WithAdapter, tmp_path, max_steps=3, optim="adamw_torch_fused", learning_rate=1e-2)
    losses = logged(trainer, "loss")
    assert losses[2] < losses[0]
    assert all("lora_" in n for n, p in trainer.model.named_parameters() if p.requires_grad)


@pytest.mark.slow
def test_label_smoothing_is_left_to_trl(tmp_path):
    settings = {"label_smoothing_factor": 0.1, "max_steps": 2}
    with pytest.warns(FutureWarning, match="label_smoothing"):
        theirs, ours = (train(cls, tmp_path, **settings) for cls in (SFTTrainer, FastTrainer))
    assert logged(ours, "loss") == logged(theirs, "loss")
    assert logged(ours, "entropy")


def settings_of_a_run(**changes):
    parallelism = {"sp_enabled": False, "cp_enabled": False, **changes.pop("parallelism", {})}
    values = {"loss_type": "nll", "label_smoother": None, "compute_loss_func": None, "aux_loss_enabled": False}
    values |= {"sp_size": 1, "is_vision": False, "is_prompt_learning": False, **changes}
    return SimpleNamespace(
        args=SimpleNamespace(loss_type=values["loss_type"]),
        accelerator=SimpleNamespace(parallelism_config=SimpleNamespace(**parallelism)),
        model=SimpleNamespace(active_peft_config=SimpleNamespace(is_prompt_learning=values["is_prompt_learning"])),
        _is_vision_dataset=values["is_vision"],
        **{name: values[name] for name in ("label_smoother", "compute_loss_func", "aux_loss_enabled", "sp_size")},
    )


@pytest.mark.parametrize(
    ("changes", "covers"),
    [
        ({}, True),
        ({"loss_type": "dft"}, False),
        ({"label_smoother": 0.1}, False),
        ({"compute_loss_func": sum}, False),
        ({"is_vision": True}, False),
        ({"is_prompt_learning": True}, False),
        ({"parallelism": {"sp_enabled": True}}, False),
        ({"parallelism": {"cp_enabled": True}}, False),
        ({"aux_loss_enabled": True}, True),
        ({"sp_size": 2}, True),
        ({"aux_loss_enabled": True, "sp_size": 2}, False),
    ],
    ids=str,
)
def test_what_the_lean_loss_does_not_compute_goes_to_trls_own(changes, covers):
    assert FastLossMixin._covers_run(settings_of_a_run(**changes)) is covers
    run = settings_of_a_run(**changes)
    run.accelerator.parallelism_config, run.model = None, None
    assert FastLossMixin._covers_run(run) is (covers or bool({"parallelism", "is_prompt_learning"} & changes.keys()))


@pytest.mark.slow
def test_compiled_it_stays_outside_the_graph_and_has_its_gradients():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    hidden, weight, bias, labels = head_inputs(torch.float32)

    def loss(hidden):
        return chunked_cross_entropy(2 * hidden, weight, labels, bias=bias)

    expected = torch.autograd.grad(loss(hidden), (hidden, weight, bias))
    found = torch.autograd.grad(torch.compile(loss, backend=backend)(hidden), (hidden, weight, bias))
    for one, other in zip(found, expected, strict=True):
        assert float(one.norm()) > 0
        torch.testing.assert_close(one, other)
    assert graphs
    assert not any("log_softmax" in code for code in graphs)
