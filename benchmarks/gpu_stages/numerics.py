"""Stage `numerics`: compares attention over packed documents, and the loss, with fp32 and single documents."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gpu_stages.box import Cases, Needs, expect, lacks

# Tolerances of the loss and of all gradients together, ‖g − g₀‖ ÷ ‖g₀‖, due to rounding products to a dtype.
TOLERANCE = {"float32": (1e-5, 1e-3), "float16": (3e-3, 2e-2), "bfloat16": (2e-2, 1e-1)}
WINDOW = 48
_FP16_SCALE = 2.0**10
# Document lengths in the packed micro-batch: shorter and longer than the window, and one of two tokens.
LENGTHS = ((130, 40, 2, 84), (200, 56))


def numerics(cases: Cases) -> None:
    """Check every attention that can run here, with and without a window, then every loss implementation."""
    from accel_scale.facts.device import ATTENTION_NAMES

    half = default_half(cases)
    for name in ATTENTION_NAMES:
        why = refusal(cases, name, half, None)
        if why:
            cases.case(name, functools.partial(lacks, why))
            continue
        for dtype in ("float32", half):
            for window in (None, WINDOW):
                label = f"{name}, {dtype}, " + ("grouped heads" if window is None else f"window of {window}")
                cases.case(label, functools.partial(attention, cases, name, dtype, window))
    for dtype in ("float32", half):
        cases.case(f"loss in chunks, {dtype}", functools.partial(loss, cases, dtype))
    cases.case("loss by Liger", functools.partial(liger, cases))


def default_half(cases: Cases) -> str:
    """The 16-bit precision that the recipes would use here; bf16 on a CPU."""
    from accel_scale.launching.machine import detect_device

    return "float16" if detect_device(cases.device).default_precision == "fp16" else "bfloat16"


def attention(cases: Cases, name: str, dtype: str, window: int | None) -> str:
    """Compare the recipe's loss and gradients of packed rows with those of each document alone."""
    from accel_scale.launching.machine import detect_device
    from accel_scale.modeling.attention import choose_kernels
    from accel_scale.modeling.attention import with_document_lengths as with_lengths
    from accel_scale.optimization.fast_loss import add_fast_lm_head
    from accel_scale.start_check.steps import loader_loss

    why = refusal(cases, name, dtype, window)
    if why:
        raise Needs(why)
    choose_kernels(detect_device(cases.device), lengths_vary=True)
    expected_loss, expected = reference(cases.device, window)
    model = build(config_with(window, cases.device), name, cases.device)
    add_fast_lm_head(model)
    inputs = with_lengths(to_device(batch(), cases.device), name)
    as_type, scale = getattr(torch, dtype), _FP16_SCALE if dtype == "float16" else 1.0
    with torch.autocast(cases.device, dtype=as_type, enabled=dtype != "float32"):
        found = loader_loss(model, inputs)
    (found * scale).backward()
    gap = abs(float(found.detach()) - expected_loss) / expected_loss
    gradients = torch.cat([p.grad.flatten().float() / scale for p in model.parameters() if p.grad is not None])
    apart = float((gradients - expected).norm() / expected.norm())
    allowed = TOLERANCE[dtype]
    return expect(gap <= allowed[0] and apart <= allowed[1], f"loss {gap:.1e}, gradients {apart:.1e} apart")


def refusal(cases: Cases, name: str, dtype: str, window: int | None) -> str | None:
    """Why the recipes would refuse this attention here; None if they would accept it."""
    from accel_scale.errors import ConfigError
    from accel_scale.launching.machine import detect_device
    from accel_scale.modeling.attention import resolve_attention

    config, device = config_with(window, cases.device), detect_device(cases.device)
    try:
        resolve_attention(name, device=device, dtype=getattr(torch, dtype), packing=True, model_config=config)
    except ConfigError as refused:
        return f"refused here: {refused.problem}"
    return None


def to_device(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    """Move tensors to `device`; other values, such as lengths, are kept."""
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}


def config_with(window: int | None, device: str) -> Any:
    """A Mistral configuration, which has windows: two layers, eight heads, two key-value heads."""
    from transformers import MistralConfig

    size = 512 if device == "cuda" else 128  # head sizes of 64 and 16
    return MistralConfig(
        vocab_size=512, hidden_size=size, intermediate_size=size, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=512, sliding_window=window, pad_token_id=0,
    )  # fmt: skip


def build(config: Any, name: str, device: str) -> Any:
    """Build a model with the same weights for any attention."""
    from transformers import MistralForCausalLM

    torch.manual_seed(0)
    config._attn_implementation = name
    return MistralForCausalLM(config).to(device).train()


@functools.cache
def batch() -> dict[str, Any]:
    """Packed rows as from TRL's collator: one row of all documents, with positions that restart."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 512, (sum(row),), generator=generator).tolist() for row in LENGTHS]
    examples = [
        {"input_ids": ids, "labels": list(ids), "seq_lengths": list(lengths)}
        for ids, lengths in zip(rows, LENGTHS, strict=True)
    ]
    return dict(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(examples))


@functools.cache
def reference(device: str, window: int | None) -> tuple[float, torch.Tensor]:
    """Loss and gradients of single documents with eager attention in fp32."""
    model = build(config_with(window, device), "eager", device)
    ids, total, begin = batch()["input_ids"][0].to(device), 0.0, 0
    lengths = [length for row in LENGTHS for length in row]
    num_targets = sum(length - 1 for length in lengths)
    for length in lengths:
        document = ids[None, begin : begin + length]
        logits = model(input_ids=document, use_cache=False).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, document[0, 1:], reduction="sum") / num_targets
        loss.backward()
        total, begin = total + float(loss.detach()), begin + length
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def loss_inputs(cases: Cases) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head (with a real vocabulary on a GPU), and labels of which a quarter are ignored."""
    tokens, hidden, vocabulary = (4096, 2048, 128_256) if cases.on_gpu else (256, 64, 2048)
    generator = torch.Generator(cases.device).manual_seed(2)
    make = functools.partial(torch.randn, device=cases.device, generator=generator)
    labels = torch.randint(0, vocabulary, (1, tokens), device=cases.device, generator=generator)
    labels[:, : tokens // 4] = -100
    return make(1, tokens, hidden), make(vocabulary, hidden) / hidden**0.5, labels


def loss(cases: Cases, dtype: str) -> str:
    """Compare `chunked_cross_entropy` with torch's in fp32, from the same operands."""
    from accel_scale.optimization.loss import chunked_cross_entropy

    return beside_torch(cases, dtype, chunked_cross_entropy)


def liger(cases: Cases) -> str:
    """Compare Liger's fused linear cross-entropy with torch's."""
    if not cases.on_gpu:
        raise Needs("needs a GPU: Liger's kernels are Triton's")
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as missing:
        raise Needs("needs liger-kernel, which is not installed") from missing

    def fused(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return LigerFusedLinearCrossEntropyLoss()(head, hidden[0, :-1], labels[0, 1:])

    return beside_torch(cases, default_half(cases), fused)


def beside_torch(cases: Cases, dtype: str, compute: Any) -> str:
    """Compare the loss by `compute` in `dtype`, and the gradients of states and head, with fp32."""
    hidden, head, labels = loss_inputs(cases)
    as_type = getattr(torch, dtype)
    ours = [tensor.to(as_type).requires_grad_() for tensor in (hidden, head)]
    value = compute(*ours, labels)
    value.backward()
    gradients = [tensor.grad for tensor in ours]
    theirs = [tensor.detach().float().requires_grad_() for tensor in ours]
    logits = theirs[0][0, :-1] @ theirs[1].T
    expected = torch.nn.functional.cross_entropy(logits, labels[0, 1:])
    expected.backward()
    gap = float((value.detach() - expected.detach()).abs() / expected.detach())
    apart = max(float((a.float() - b.grad).norm() / b.grad.norm()) for a, b in zip(gradients, theirs, strict=True))
    allowed = TOLERANCE[dtype]
    return expect(gap <= allowed[0] and apart <= allowed[1], f"loss {gap:.1e}, gradients {apart:.1e} apart")
