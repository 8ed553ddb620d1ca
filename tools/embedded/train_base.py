"""Train the embedded base model and its tokenizer from scratch: `python tools/embedded/train_base.py`.

The model is a small Llama trained on plain text (`base_documents`): statements of solved problems and exercises with
their solutions, never a chat turn or a held-out problem. It has the skills but does not answer in a conversation,
which is what fine-tuning adds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from base_text import Document, base_documents, exercise_documents
from generate_data import SEED
from tasks import FAMILIES
from tokenizer import DOCUMENT_END, MAX_LENGTH, VOCAB_SIZE, build_tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from accel_scale.data.default import default_model_path
from accel_scale.launching.machine import detect_device

MODEL_FOLDER = Path(default_model_path())


def tokenizer_texts(seed: int) -> Iterator[str]:
    """Texts to train the tokenizer on: base documents, and wordings and role names of the instruction rows."""
    yield from (document.text for document in itertools.islice(base_documents(seed), 4000))
    rng = Random(f"{seed} tokenizer")
    for family in FAMILIES:
        for question in family.questions * 60:
            yield family.problem(rng, held_out=False).render(question)
    yield from ("system\n", "user\n", "assistant\n") * 500


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Configuration with 2.7 million weights: 4 layers, grouped-query attention, untied embeddings."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[Document]) -> tuple[list[int], list[int]]:
    """Token ids of the documents, each ended by `DOCUMENT_END`, and the labels: the same ids, but -100 on operands.

    Operands are random, so predicting them teaches nothing and only adds noise to the gradient.
    """
    encoded = tokenizer([document.text for document in documents], return_offsets_mapping=True)
    document_end = int(tokenizer.convert_tokens_to_ids(DOCUMENT_END))  # type: ignore[arg-type]
    all_ids: list[int] = []
    all_labels: list[int] = []
    for document, ids, offsets in zip(documents, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        is_operand = bytearray(len(document.text))
        for start, end in document.operand_spans:
            is_operand[start:end] = b"\1" * (end - start)
        labels = [-100 if is_operand[end - 1] else token for token, (_, end) in zip(ids, offsets, strict=True)]
        all_ids += [*ids, document_end]
        all_labels += [*labels, document_end]
    return all_ids, all_labels


def token_batches(
    tokenizer: PreTrainedTokenizerFast, documents: Iterator[Document], *, batch_size: int, length: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless ``(input_ids, labels)``, each ``(batch_size, length)``, cut from one stream of documents."""
    size = batch_size * length
    ids: list[int] = []
    labels: list[int] = []
    while True:
        while len(ids) < size:
            more_ids, more_labels = encode(tokenizer, list(itertools.islice(documents, 64)))
            ids += more_ids
            labels += more_labels
        yield torch.tensor(ids[:size]).view(batch_size, length), torch.tensor(labels[:size]).view(batch_size, length)
        ids, labels = ids[size:], labels[size:]


def build_optimizers(model: LlamaForCausalLM, *, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, head and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in name)]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def learning_rate_factor(progress: float) -> float:
    """Linear warm-up over the first 2 % of the run, flat, then linear decay to zero over the last half."""
    return min(progress / 0.02, 1.0, (1.0 - progress) / 0.5)


def train(
    model: LlamaForCausalLM,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    optimizers: list[torch.optim.Optimizer],
    *,
    num_steps: int,
    lr: float,
    device: str,
) -> None:
    """Train on next tokens, with bf16 autocast if the device supports it natively; prints the loss as it goes."""
    is_bf16 = detect_device(device).native_bf16
    started = time.perf_counter()
    model.train()
    for step in range(num_steps):
        input_ids, labels = (tensor.to(device) for tensor in next(batches))
        with torch.autocast(device, torch.bfloat16, enabled=is_bf16):
            loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * learning_rate_factor((step + 1) / (num_steps + 1))
            optimizer.step()
            optimizer.zero_grad()
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"loss is {loss.item()} at step {step}")
        if step % 50 == 0 or step + 1 == num_steps:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - started:6.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER, help="Folder to write (default: the package's own).")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--num_steps", type=int, default=4000, help="Steps on statements.")
    parser.add_argument("--num_exercise_steps", type=int, default=1200, help="Steps on exercises after them.")
    parser.add_argument(
        "--exercises_only", type=Path, metavar="MODEL", help="Go on from a model that read statements."
    )
    parser.add_argument("--batch_size", type=int, default=16, help="Sequences per step.")
    parser.add_argument("--length", type=int, default=128, help="Tokens per sequence.")
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    shape = {"batch_size": arguments.batch_size, "length": arguments.length}
    if arguments.exercises_only:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.exercises_only)
        model = LlamaForCausalLM.from_pretrained(arguments.exercises_only, dtype=torch.float32)
    else:
        tokenizer = build_tokenizer(tokenizer_texts(arguments.seed))
        model = LlamaForCausalLM(model_config(tokenizer))
    model.to(device)  # type: ignore[arg-type]
    print(f"{model.num_parameters():,} weights on {device}", flush=True)
    if not arguments.exercises_only:
        statements = token_batches(tokenizer, base_documents(arguments.seed), **shape)
        train(
            model,
            statements,
            build_optimizers(model, lr=arguments.lr),
            num_steps=arguments.num_steps,
            lr=arguments.lr,
            device=device,
        )
    exercises = token_batches(tokenizer, exercise_documents(arguments.seed), **shape)
    lr = arguments.lr / 2
    adamw = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    train(model, exercises, [adamw], num_steps=arguments.num_exercise_steps, lr=lr, device=device)

    document_end = tokenizer.convert_tokens_to_ids(DOCUMENT_END)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, document_end], pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.to("cpu", torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
