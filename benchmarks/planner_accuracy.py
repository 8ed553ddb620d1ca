"""Measure the error of the planner's memory on published measurements, next to the estimators of Accelerate and
DeepSpeed.

    python benchmarks/planner_accuracy.py            # prints the scoreboard
    python benchmarks/planner_accuracy.py --write    # and writes docs/planner_accuracy.md and its JSON

Rows of grade A and B (benchmarks/data/memory_measurements.json) are predicted as published; nothing is fitted to
single rows. Errors are relative to the measured value. *Dangerous*: the planner's upper bound fits on some card of a
usual size but the measured value does not; runs that their source says ran out of memory are counted apart.
*Direction*: of two rows of one source whose measurements differ by more than 5 %, the planner predicts the same one to
be larger. *Inside*: the measured value is in the interval, whose half-width is given as a share of the prediction.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published_rows import HF_STACKS, PublishedRow, load_rows, model_of, published_row, setup_of, source_of

from accel_scale.errors import ConfigError
from accel_scale.planning.cost.memory import MemoryEstimate, predict_memory
from accel_scale.planning.models.parameters import parameter_groups
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.quiet import quiet_imports

GIB = 2**30
_CARD_GIB = re.compile(r"(\d+)GB")
CARDS_GIB = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)
REPOSITORY = Path(__file__).resolve().parents[1]
SCOREBOARD = REPOSITORY / "docs" / "planner_accuracy.md"
RESULTS = REPOSITORY / "benchmarks" / "results" / "planner_accuracy.json"

# Facts of the versions that were measured, which `TrainingSetup` has fields for.
AS_MEASURED = (
    "litgpt's rows are of 2023 and 2024: bitsandbytes before 0.44 (its pull request 1270) kept the inputs of 4-bit "
    + "products, and those of the micro-batch before until the loop named another loss.",
    "Until March 2025 (pull request 1538), litgpt put a layer's frozen and trained weights in one FSDP1 parameter: "
    + "all of them had gradients, whole while accumulating.",
    "torchtitan's selective checkpointing keeps attention and every second matrix product. Its tensor parallelism "
    + "divides hidden states and the loss's vocabulary, too. A pipeline of 2024 had as many micro-batches as ranks "
    + "and kept weights gathered between them. Since April 2025 (bbb1b616e), the loss is compiled.",
    "Compiled layers keep what layers with fused norms and gates keep.",
)
# Reasons for errors of more than 25 %, by what the rows have in common.
EXPLANATIONS = {
    "qwen fp16": "Qwen's own code takes the loss of fp16 logits under DeepSpeed; transformers, which is modelled, "
    "makes an fp32 copy of them, so long rows are predicted too large.",
    "torchtitan": "torchtitan's tables differ by 30 % for one setting; these rows are below what its tensors need.",
    "own loop": "Trained by a loop of its own (fused projections, losses in chunks of its own, its own compilation), "
    "not by transformers; listed to show where the model of the layers ends.",
}


@dataclass(frozen=True)
class Scored:
    """One row with the predictions of the planner and the other estimators, in GiB."""

    row: PublishedRow
    predicted: float
    margin: float
    accelerate: float
    deepspeed: float

    @property
    def error(self) -> float:
        """Signed error relative to the measured value."""
        return self.predicted / self.row.measured_gib - 1

    @property
    def upper(self) -> float:
        """Upper end of the interval."""
        return self.predicted + self.margin

    @property
    def is_inside(self) -> bool:
        """True if the measured value is in the interval."""
        return abs(self.predicted - self.row.measured_gib) <= self.margin

    @property
    def is_dangerous(self) -> bool:
        """True if the upper bound fits on some card but the measured value does not."""
        return any(self.upper <= card < self.row.measured_gib for card in CARDS_GIB)


def score(rows: Sequence[dict[str, Any]]) -> tuple[list[Scored], list[str]]:
    """Predict all measured rows of grade A and B; also returns why others could not be predicted."""
    scored, refused = [], []
    for row in rows:
        if row["grade"] not in "AB" or row["kind"] != "measured":
            continue
        try:
            published = published_row(row)
            estimate = predict_memory(published.model, published.setup)
        except ConfigError as error:
            refused.append(f"row {row['id']} ({row['model']['name']}): {error}")
            continue
        scored.append(_scored(published, estimate))
    return scored, refused


def _scored(row: PublishedRow, estimate: MemoryEstimate) -> Scored:
    # Paged states are in managed memory, which torch's allocator does not count; those below 100,000 values, as an
    # adapter's, do not (bitsandbytes 0.50, `Optimizer2State.get_state_buffer`).
    is_paged = row.setup.optimizer.startswith("paged") and row.setup.trains_all
    shift = -estimate.states.optimizer_bytes if is_paged else 0.0
    if row.has_old_adamw:
        (update,) = (phase for phase in estimate.phases if phase.name == "optimizer step")
        shift += max(0.0, update.total_bytes + estimate.states.update_bytes - estimate.peak_bytes)
    values = {
        "allocated": estimate.peak_bytes,
        "reserved": estimate.reserved_bytes,
        "device": estimate.device_bytes,
    }
    margin = estimate.half_bytes
    predicted = values[row.metric] + shift * (not (is_paged and row.metric == "device"))
    return Scored(row, predicted / GIB, margin / GIB, accelerate_gib(row), deepspeed_gib(row))


def accelerate_gib(row: PublishedRow) -> float:
    """The estimate of ``accelerate estimate-memory`` for training with Adam, from parameters and dtype only."""
    from accelerate.commands.estimate import estimate_training_usage

    # Called as in the command: with the size of the model in the requested dtype.
    dtype, width = {"fp32": ("float32", 4), "fp16": ("float16", 2)}.get(row.setup.precision, ("bfloat16", 2))
    usage = estimate_training_usage(row.model.num_params * width, dtype)
    return max(usage.values()) / GIB


def deepspeed_gib(row: PublishedRow) -> float:
    """DeepSpeed's estimate of model states on the row's GPUs for its stage (rows without DeepSpeed as ZeRO-2)."""
    quiet_imports()
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    parallel, total = row.setup.parallel, row.model.num_params
    if parallel.shards_weights:
        largest = parameter_groups(row.model, row.setup).largest_layer
        needs = estimate_zero3_model_states_mem_needs(total, largest, parallel.num_gpus, 1, False, False)
    else:
        needs = estimate_zero2_model_states_mem_needs(total, parallel.num_gpus, 1, False)
    return needs[1] / GIB


def ordered_alike(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For pairs of points, predicted and measured: if the larger is predicted larger. They differ by 5 % at least."""
    pairs = itertools.combinations(points, 2)
    return [(a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs if abs(a[1] / b[1] - 1) > 0.05]


def direction(rows: Sequence[Scored]) -> float | None:
    """Share of pairs measured more than 5 % apart that the planner orders in the same way."""
    alike = ordered_alike([(row.predicted, row.row.measured_gib) for row in rows])
    return sum(alike) / len(alike) if alike else None


def summary(rows: Sequence[Scored]) -> dict[str, Any]:
    """Summary figures of one source."""
    errors = sorted(abs(row.error) for row in rows)
    others = {
        name: statistics.median(abs(getattr(row, name) / row.row.measured_gib - 1) for row in rows)
        for name in ("accelerate", "deepspeed")
    }
    return {
        "rows": len(rows),
        "median_error": round(statistics.median(errors), 4),
        "p90_error": round(errors[min(len(errors) - 1, int(0.9 * len(errors)))], 4),
        "bias": round(statistics.median(row.error for row in rows), 4),
        "direction": None if (value := direction(rows)) is None else round(value, 4),
        "inside": round(sum(row.is_inside for row in rows) / len(rows), 4),
        "half_width": round(statistics.median(row.margin / row.predicted for row in rows), 4),
        "dangerous": round(sum(row.is_dangerous for row in rows) / len(rows), 4),
        **{f"{name}_median_error": round(value, 4) for name, value in others.items()},
    }


def scoreboard() -> dict[str, Any]:
    """Figures of every source, separated into HF stacks and others, and every miss above 25 %."""
    scored, refused = score(load_rows())
    groups: dict[tuple[bool, str], list[Scored]] = defaultdict(list)
    for item in scored:
        groups[item.row.stack in HF_STACKS, item.row.source].append(item)
    hf = [item for item in scored if item.row.stack in HF_STACKS]
    return {
        "hf": {source: summary(rows) for (is_hf, source), rows in groups.items() if is_hf},
        "other": {source: summary(rows) for (is_hf, source), rows in groups.items() if not is_hf},
        "all_hf": summary(hf),
        "all": summary(scored),
        "out_of_memory": out_of_memory(load_rows()),
        "misses": [_miss(item) for item in scored if abs(item.error) > 0.25],
        "refused": refused,
    }


def out_of_memory(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every run that its source says ran out of memory, with what the planner says it needs and its card's size."""
    found = []
    for row in rows:
        if row["kind"] == "boundary_oom":
            model, setup = model_of(row), setup_of(row)
            card = int(_CARD_GIB.search(row["gpu"])[1])  # type: ignore[index]
            estimate = predict_memory(model, setup, limit_bytes=card * GIB)
            found.append(
                {
                    "id": row["id"],
                    "source": source_of(row),
                    "what": _what(model.name, setup),
                    "card_gib": card,
                    "predicted_gib": round(estimate.device_bytes / GIB, 1),
                    "upper_gib": round(estimate.high_bytes / GIB, 1),
                    "said_to_fit": estimate.high_bytes <= card * GIB,
                }
            )
    return found


def _what(model: str, setup: TrainingSetup) -> str:
    rows = f"{setup.micro_batch_size} × {setup.sequence_length} tokens"
    return f"{model}, {setup.method}, {setup.parallel.strategy} on {setup.parallel.num_gpus}, {rows}"


def _miss(item: Scored) -> dict[str, Any]:
    setup, row = item.row.setup, item.row
    why = "torchtitan" if row.stack == "torchtitan" else "own loop"
    if row.stack in HF_STACKS:
        why = "qwen fp16" if row.model.model_type == "qwen" and setup.precision == "fp16" else "unexplained"
    return {
        "id": row.id,
        "source": row.source,
        "what": _what(row.model.name, setup),
        "measured_gib": round(row.measured_gib, 2),
        "predicted_gib": round(item.predicted, 2),
        "error": round(item.error, 3),
        "why": why,
    }


def markdown(board: dict[str, Any]) -> str:
    """The scoreboard as a page."""
    lines = [
        "# The planner on published measurements",
        "",
        "Made by `python benchmarks/planner_accuracy.py --write`, whose first lines say what the columns mean. A test "
        "fails when a figure gets worse.",
    ]
    for key, title in (("hf", "Hugging Face stacks"), ("other", "Other training loops")):
        lines += ["", f"## {title}", ""]
        heads = ("source", "rows", "median error", "90th percentile", "bias", "direction", "inside", "half-width")
        heads += ("dangerous",)
        heads += ("`accelerate estimate-memory`", "DeepSpeed's estimator")
        lines += [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
        lines += [_line(source, figures) for source, figures in board[key].items()]
        if key == "hf":
            lines.append(_line("**all of them**", board["all_hf"]))
        else:
            lines += [_line("**every row, of both tables**", board["all"]), "", *(f"- {text}" for text in AS_MEASURED)]
    lines += ["", "The last two columns are the median errors of those estimators on the same rows.", ""]
    lines += ["## Published out-of-memory errors", ""]
    lines += ["| row | what | card, GiB | predicted | upper bound | said to fit |", "|---:|---|---:|---:|---:|---|"]
    lines += [
        f"| {o['id']} | {o['what']} | {o['card_gib']} | {o['predicted_gib']} | {o['upper_gib']} "
        f"| {'yes' if o['said_to_fit'] else 'no'} |"
        for o in board["out_of_memory"]
    ]
    lines += ["", "## Misses above 25 %", "", "| row | what | measured, GiB | predicted | error | why |"]
    lines += ["|---:|---|---:|---:|---:|---|"]
    lines += [
        f"| {m['id']} | {m['what']} | {m['measured_gib']} | {m['predicted_gib']} | {m['error']:+.0%} | {m['why']} |"
        for m in board["misses"]
    ]
    used = {miss["why"] for miss in board["misses"]}
    lines += ["", *(f"- **{key}**: {text}" for key, text in EXPLANATIONS.items() if key in used)]
    lines += ["", "## Rows that cannot be asked", "", *(f"- {text}" for text in board["refused"])]
    return "\n".join(lines) + "\n"


def _line(source: str, f: dict[str, Any]) -> str:
    ordered = "–" if f["direction"] is None else f"{f['direction']:.0%}"
    cells = [source, str(f["rows"]), f"{f['median_error']:.1%}", f"{f['p90_error']:.1%}", f"{f['bias']:+.1%}", ordered]
    cells += [f"{f['inside']:.0%}", f"{f['half_width']:.1%}"]
    cells += [f"{f['dangerous']:.1%}", f"{f['accelerate_median_error']:.0%}", f"{f['deepspeed_median_error']:.0%}"]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="Write the page and the JSON that the test compares with."
    )
    options = parser.parse_args(argv)
    board = scoreboard()
    text = markdown(board)
    print(text)
    if options.write:
        SCOREBOARD.write_text(text)
        RESULTS.write_text(json.dumps(board, indent=1) + "\n")


if __name__ == "__main__":
    main()
