"""Exact match: answer questions greedily in batches and count the answers that equal the expected ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.modeling.evaluation_mode import evaluating

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """One answered question: its task, its text, the expected answer and the model's answer (both as written)."""

    task: str
    question: str
    expected: str
    predicted: str
    correct: bool


@dataclass(frozen=True)
class TaskScore:
    """Correct answers of one task."""

    num_correct: int
    num_questions: int

    @property
    def accuracy(self) -> float:
        """Share of correct answers; 0.0 without questions."""
        return self.num_correct / self.num_questions if self.num_questions else 0.0


@dataclass(frozen=True)
class ExactMatch(TaskScore):
    """The whole result. `tasks` counts per task; `examples` are this rank's first answers; `seconds` is wall time."""

    tasks: dict[str, TaskScore]
    examples: tuple[Example, ...]
    seconds: float


def normalize_answer(text: str) -> str:
    """Normalize an answer for comparison: outer white space and one final period are dropped, inner runs of white
    space become one space, and letter case is ignored."""
    return " ".join(text.split()).removesuffix(".").rstrip().casefold()


def exact_match(
    model: Any,
    tokenizer: Any,
    questions: Iterable[Mapping[str, Any]],
    *,
    batch_size: int = 100,
    max_new_tokens: int = 32,
    rank: int = 0,
    world_size: int = 1,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    num_examples: int = 12,
) -> ExactMatch:
    """Answer `questions` by greedy decoding and count exact matches after `normalize_answer`.

    A question is a row with ``messages`` (the last assistant turn, if any, is not shown to the model), or with a
    ``prompt`` that is a string or a list of messages. The expected answer is its ``answer``, or else the last
    assistant turn, the ``completion``, or the ``chosen`` answer. ``task`` groups the counts ("all" if absent).

    Args:
        model: Causal language model with `generate`; `DistributedDataParallel` is unwrapped.
        batch_size: Questions generated together; they are sorted by length to save padding.
        max_new_tokens: Tokens after which an answer is cut off, and is therefore usually wrong.
        rank, world_size: This process's share among data-parallel replicas (ranks that hold pieces of one layer, as
            in tensor parallelism, must pass the same pair). Sharded weights (FSDP2, ZeRO-3) are gathered layer by
            layer by their own hooks: every rank then generates equally many batches and steps, so all must call this.
        reduce: Sums an int64 tensor over the ranks, e.g. ``lambda t: accelerator.reduce(t, "sum")``. Without it, each
            rank counts only its own share.

    Raises:
        ConfigError: A row without an answer or prompt, or messages without a chat template.
    """
    started = time.perf_counter()
    model = getattr(model, "module", model) if not hasattr(model, "generate") else model
    rows = [_Row.read(row, tokenizer, index) for index, row in enumerate(questions)]
    share = _share(rows, rank, world_size)
    with evaluating(model):
        predicted = _answers(
            model,
            tokenizer,
            [row.prompt_ids for row in share],
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            in_step=world_size > 1 and _is_sharded(model),
        )
    examples = [row.judge(text) for row, text in zip(share, predicted, strict=True)]
    # The share may end with a row repeated to keep the ranks in step; it is not counted.
    own = examples[: len(rows[rank::world_size])]
    tasks = _count([row.task for row in rows], own, reduce, device=next(model.parameters()).device)
    return ExactMatch(
        num_correct=sum(score.num_correct for score in tasks.values()),
        num_questions=sum(score.num_questions for score in tasks.values()),
        tasks=tasks,
        examples=tuple(own[:num_examples]),
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class _Row:
    task: str
    question: str
    expected: str
    prompt_ids: list[int]

    @classmethod
    def read(cls, row: Mapping[str, Any], tokenizer: Any, index: int) -> _Row:
        messages, expected = prompt_and_answer(row, index)
        if isinstance(messages, str):
            question, prompt_ids = messages, tokenizer(messages)["input_ids"]
        else:
            if not getattr(tokenizer, "chat_template", None):
                raise ConfigError(
                    "The questions are chat messages but the tokenizer has no chat template.",
                    fix="Use a tokenizer with a chat template, or rows with string `prompt` and `answer`.",
                )
            question = str(messages[-1]["content"]) if messages else ""
            encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            prompt_ids = encoded["input_ids"]
        return cls(str(row.get("task") or "all"), question, expected, list(prompt_ids))

    def judge(self, predicted: str) -> Example:
        correct = normalize_answer(predicted) == normalize_answer(self.expected)
        return Example(self.task, self.question, self.expected, predicted, correct)


def prompt_and_answer(row: Mapping[str, Any], index: int) -> tuple[str | list[dict[str, Any]], str]:
    """Return the prompt, as text or as messages without the final assistant turn, and the expected answer."""
    prompt: Any = row.get("prompt")
    answer: Any = row.get("answer")
    turns = row.get("messages") or (None if prompt else row.get("chosen"))
    if turns and not isinstance(turns, str):
        prompt = list(turns)
        if prompt[-1]["role"] == "assistant":
            turn = prompt.pop()
            answer = turn["content"] if answer is None else answer
    elif answer is None:
        better = row.get("completion") or row.get("chosen")
        answer = better[-1]["content"] if isinstance(better, list) and better else better
    if not prompt or answer is None:
        raise ConfigError(
            f"Question {index} has no {'prompt' if not prompt else 'expected answer'}.",
            fix="Give every row `messages` or `prompt`, and `answer`, an assistant turn, `completion` or `chosen`.",
        )
    return prompt, str(answer)


def _share(rows: Sequence[_Row], rank: int, world_size: int) -> list[_Row]:
    """Every `world_size`-th row from `rank`, padded so that all ranks answer the same number of rows."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not below world_size {world_size}")
    share = list(rows[rank::world_size])
    while rows and len(share) < -(-len(rows) // world_size):
        share.append(rows[-1])
    return share


def _is_sharded(model: nn.Module) -> bool:
    """True if a forward pass communicates: FSDP's DTensor parameters or ZeRO-3's partitioned ones."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())


def _answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    in_step: bool,
) -> list[str]:
    """The text generated after each prompt up to the end token; every batch is one left-padded `generate`."""
    import torch

    config = _greedy_config(model, tokenizer, max_new_tokens)
    device = next(model.parameters()).device
    answers = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        width = max(len(prompts[i]) for i in batch)
        padded = [[config.pad_token_id] * (width - len(prompts[i])) + prompts[i] for i in batch]
        mask = [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch]
        output = model.generate(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=config,
            synced_gpus=in_step,
        )
        for i, ids in zip(batch, output[:, width:].tolist(), strict=True):
            answers[i] = tokenizer.decode(_until_end(ids, config.eos_token_id), skip_special_tokens=True)
    return answers


def _until_end(ids: list[int], end_ids: Sequence[int]) -> list[int]:
    """Cut `ids` at the first end token: what follows is padding or, in step with other ranks, noise."""
    ends = [position for position, token in enumerate(ids) if token in end_ids]
    return ids[: ends[0]] if ends else ids


def _greedy_config(model: nn.Module, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> Any:
    """Plain greedy decoding; every value is set, because `generate` fills unset ones from the model's config."""
    from transformers import GenerationConfig

    own = getattr(model.generation_config, "eos_token_id", None)
    end_ids = {tokenizer.eos_token_id, *(own if isinstance(own, (list, tuple)) else [own])} - {None}
    if not end_ids:
        raise ConfigError("Neither tokenizer nor model names an end token.", fix="Set tokenizer.eos_token.")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(end_ids)
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
        repetition_penalty=1.0,
        use_cache=True,
        eos_token_id=sorted(end_ids),
        pad_token_id=pad_id,
    )


def _count(
    all_tasks: Sequence[str],
    examples: Sequence[Example],
    reduce: Callable[[torch.Tensor], torch.Tensor] | None,
    *,
    device: torch.device,
) -> dict[str, TaskScore]:
    """Correct answers and questions per task, summed over the ranks by `reduce`; the same task order on every rank."""
    import torch

    names = sorted(set(all_tasks))
    counts = torch.zeros(len(names), 2, dtype=torch.int64, device=device)
    for example in examples:
        counts[names.index(example.task)] += torch.tensor([example.correct, 1], device=device)
    if reduce is not None:
        counts = reduce(counts)
    return {name: TaskScore(int(c), int(n)) for name, (c, n) in zip(names, counts.tolist(), strict=True)}
