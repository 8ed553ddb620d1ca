"""Evaluation of a loaded model: exact match on a file or the embedded questions, other tasks with lm-eval."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from accel_scale.errors import ConfigError, first_sentence
from accel_scale.inference.saved import SavedModel, quantization_of_base
from accel_scale.training.evaluation.exact_match import prompt_and_answer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "embedded"
_EMBEDDED_QUESTIONS = 200  # the default of recipes/sft.py
Row = Mapping[str, object]


def is_file_task(task: str) -> bool:
    """True if a task is a file of questions rather than a name."""
    return task.endswith((".jsonl", ".ndjson", ".json")) or "/" in task or Path(task).is_file()


def read_questions(path: Path) -> list[Row]:
    """Rows of a JSON Lines file: ``prompt`` and ``completion``, or any other form that exact match accepts.

    Raises:
        ConfigError: naming file and line of a row without a prompt or an answer.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        raise ConfigError(f"cannot be read ({why}).", place=str(path), fix="check the path.") from None
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            fix = "write one JSON object per line."
            raise ConfigError(f"no JSON: {first_sentence(error)}.", place=place, fix=fix) from None
        try:
            if not isinstance(row, dict):
                raise ConfigError("a row is an object.", fix='write {"prompt": "…", "completion": "…"}.')
            prompt_and_answer(row, len(rows))
        except (ConfigError, KeyError, TypeError, IndexError) as error:
            fix = 'write {"prompt": "…", "completion": "…"}.'
            problem = "no question and answer." if not isinstance(error, ConfigError) else error.problem
            raise ConfigError(problem, place=place, fix=fix) from None
        rows.append(row)
    if not rows:
        raise ConfigError("it has no rows.", place=str(path), fix='write {"prompt": "…", "completion": "…"} per line.')
    return rows


def embedded_questions() -> list[Row]:
    """The held-out questions that `recipes/sft.py` reports on."""
    from accel_scale.data.default import default_dataset

    return cast("list[Row]", default_dataset()[1].select(range(_EMBEDDED_QUESTIONS)).to_list())


def match_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, object]:
    """Exact match as reported by the recipes: counts, accuracy, and accuracy per task."""
    from accel_scale.training.evaluation.exact_match import exact_match

    found = exact_match(
        model,
        tokenizer,
        rows,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        reduce=reduce,
    )
    return {
        "exact_match": found.accuracy,
        "num_correct": found.num_correct,
        "num_questions": found.num_questions,
        "tasks": {name: score.accuracy for name, score in found.tasks.items()},
        "seconds": found.seconds,
    }


def check_harness(tasks: Sequence[str]) -> None:
    """Refuse tasks of lm-evaluation-harness if it is not installed.

    Raises:
        ConfigError: naming the extra to install.
    """
    if tasks and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            f"{', '.join(tasks)} are tasks of lm-evaluation-harness, which is not installed.",
            place="--tasks",
            fix=f"pip install 'accel-scale[eval]', or use {EMBEDDED} or a file of questions.",
        )


def run_harness(
    saved: SavedModel,
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None,
    tasks: Sequence[str],
    *,
    batch_size: int,
    limit: int | None = None,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
) -> dict[str, dict[str, float]]:
    """Values of lm-evaluation-harness by task and metric; empty on processes other than the first.

    Args:
        loaded: Model and tokenizer, in a single process. If None, the harness loads them and shares requests among
            the processes of the launch.

    Raises:
        ConfigError: for a task that the harness does not have, naming the closest one.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        import difflib

        near = difflib.get_close_matches(unknown[0], manager.all_tasks, n=1)
        fix = f"did you mean {near[0]}?" if near else "see lm-eval ls tasks."
        raise ConfigError(f"lm-evaluation-harness has no task {unknown[0]!r}.", place="--tasks", fix=fix)
    if loaded is not None:
        language_model = HFLM(pretrained=loaded[0], tokenizer=loaded[1], batch_size=batch_size)
    else:
        adapter = str(saved.folder) if saved.base is not None else None
        quantization = quantization_of_base(saved)
        options = {} if quantization is None else {"quantization_config": quantization}
        source = str(saved.base or saved.folder)
        language_model = HFLM(
            pretrained=source, peft=adapter, tokenizer=str(saved.folder), batch_size=batch_size, **options
        )
    results = simple_evaluate(
        model=language_model,
        tasks=list(tasks),
        limit=limit,
        num_fewshot=num_fewshot,
        task_manager=manager,
        apply_chat_template=chat,
        log_samples=False,
    )
    if results is None:
        return {}
    return {
        str(task): {str(metric): float(value) for metric, value in scores.items() if isinstance(value, (int, float))}
        for task, scores in results["results"].items()
    }
