"""The planner beside real training steps on this machine's device: allocated, reserved and step time.

    python benchmarks/gpu_plan.py                                   # models of 0.5B–8B on a GPU, small ones on a CPU
    python benchmarks/gpu_plan.py --models Qwen/Qwen2.5-0.5B --seconds 120

Models are of the planner's catalogue, with random weights made on the device: no network, no disk. Each case runs in
a process of its own, so that running out of memory ends nothing else, and its prediction is made before it runs.
Needs what the repository carries, torch, transformers, peft and, for QLoRA, bitsandbytes. Results, with hardware,
versions, date and commit, go to `benchmarks/results/gpu_plan_<device>.json` and a table beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from apart import run_apart

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

GPU_MODELS = ("Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B")
CPU_MODELS = ("llama", "qwen3")
# The architecture of a catalogue model at a size that a CPU trains in seconds.
CPU_SHAPE = {
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 512, "vocab_size": 2048,
}  # fmt: skip
_GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One step: what differs from full fine-tuning in mixed bf16 with fused AdamW."""

    model: str
    method: str = "full"
    checkpointing: str = "full"
    micro_batch: int = 1
    length: int = 1024
    precision: str = "bf16"
    optimizer: str = "adamw_torch_fused"

    @property
    def label(self) -> str:
        """For tables."""
        text = f"{self.model}, {self.method}, {self.checkpointing}, {self.micro_batch} × {self.length}"
        extra = [v for v in (self.precision, self.optimizer) if v not in ("bf16", "adamw_torch_fused")]
        return ", ".join([text, *extra])

    @property
    def setup(self) -> Any:
        """The same in the planner's terms."""
        from accel_scale.planning.models.training_setup import TrainingSetup
        from accel_scale.verifying.trial_step import one_process

        return one_process(
            TrainingSetup(
                method=self.method,
                checkpointing=self.checkpointing,
                micro_batch_size=self.micro_batch,
                sequence_length=self.length,
                precision=self.precision,
                optimizer=self.optimizer,
            )
        )


def cases(models: tuple[str, ...], *, on_gpu: bool) -> list[Case]:
    """What is measured, most telling first: the time may not suffice for all."""
    length, precision = (1024, "bf16") if on_gpu else (128, "fp32")
    base = [Case(model, length=length, precision=precision) for model in models]
    found = [replace(case, method=m, micro_batch=4) for case in base for m in ("full", "lora", "qlora")]
    found += [replace(case, method=m, checkpointing="none") for case in base for m in ("full", "lora", "qlora")]
    found += [replace(case, method="lora", checkpointing="selective", micro_batch=4) for case in base]
    if on_gpu:
        found += [
            replace(case, micro_batch=4, optimizer=o) for case in base[:2] for o in ("adamw_8bit", "adamw_torch")
        ]
        found += [replace(case, method="lora", micro_batch=16) for case in base]
        found += [replace(case, precision="bf16_true", micro_batch=4) for case in base]
    return found


def config_of(case: Case) -> Any:
    """The model's transformers configuration."""
    from transformers import AutoConfig

    from accel_scale.planning.models.catalogue import catalogue_config

    values = catalogue_config(case.model) or {"model_type": case.model, **CPU_SHAPE}
    return AutoConfig.for_model(**values)


def predict(case: Case, *, on_gpu: bool) -> dict[str, float | None]:
    """Bytes and seconds, before anything runs."""
    from accel_scale.errors import ConfigError
    from accel_scale.facts.hardware import detect_local
    from accel_scale.planning.cost.memory import predict_memory
    from accel_scale.planning.cost.timing import predict_time
    from accel_scale.planning.models.model_config import facts_from_config

    facts = facts_from_config(config_of(case).to_dict(), name=case.model)
    memory = predict_memory(facts, case.setup, is_cuda=on_gpu, is_tracked=not on_gpu)
    machine, seconds = detect_local(), None
    if machine is not None and machine.gpu.peak_flops is not None:
        try:
            seconds = predict_time(facts, case.setup, machine).step_seconds
        except ConfigError as error:
            print(f"no time predicted: {error}", file=sys.stderr)
    return {
        "allocated_bytes": memory.peak_bytes,
        "reserved_bytes": memory.reserved_bytes if on_gpu else None,
        "high_bytes": memory.high_bytes,
        "low_bytes": memory.low_bytes,
        "step_seconds": seconds,
    }


def measure(case: Case) -> dict[str, Any]:
    """Run the case in this process."""
    import torch

    from accel_scale.verifying.trial_step import measure_step

    on_gpu = torch.cuda.is_available()
    steps = 5 if on_gpu else 2
    found = measure_step(config_of(case), case.setup, device="cuda" if on_gpu else "cpu", num_steps=steps)
    return {
        "allocated_bytes": found.peak_bytes,
        "reserved_bytes": found.reserved_bytes,
        "step_seconds": found.step_seconds,
        "parts": asdict(found),
    }


def measure_apart(case: Case, limit: float) -> dict[str, Any]:
    """Run the case in a process of its own; what it measured, or the last line of its failure."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", json.dumps(asdict(case))]
    printed, failure = run_apart(command, limit_seconds=limit)
    return {"error": failure} if failure else json.loads(printed.splitlines()[-1])


def error_of(row: dict[str, Any], name: str) -> float | None:
    """(predicted − measured) ÷ measured; None where one of them is missing."""
    predicted, measured = row["predicted"].get(name), row["measured"].get(name)
    return (predicted - measured) / measured if predicted and measured else None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and largest absolute error of each figure, and how often a case that should fit ran out of memory."""
    found: dict[str, Any] = {}
    for name in ("allocated_bytes", "reserved_bytes", "step_seconds"):
        errors = [abs(error) for row in rows if (error := error_of(row, name)) is not None]
        if errors:
            found[name] = {"cases": len(errors), "median_error": statistics.median(errors), "worst_error": max(errors)}
    found["dangerous"] = sum(row["should_fit"] and "memory" in row["measured"].get("error", "") for row in rows)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: predicted / measured (error) for each case."""
    lines = ["| case | allocated GiB | reserved GiB | step s | note |", "|---|---|---|---|---|"]
    for row in rows:
        cells = []
        for name, scale in (("allocated_bytes", _GIB), ("reserved_bytes", _GIB), ("step_seconds", 1.0)):
            predicted, measured, error = row["predicted"].get(name), row["measured"].get(name), error_of(row, name)
            text = [f"{value / scale:.3g}" if value else "–" for value in (predicted, measured)]
            cells.append(" / ".join(text) + (f" ({error:+.1%})" if error is not None else ""))
        lines.append(f"| {row['label']} | {' | '.join(cells)} | {row['measured'].get('error', '')} |")
    return "\n".join(lines) + "\n"


def heading(document: dict[str, Any]) -> str:
    """Device, date, versions and the errors in words."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [f"# `benchmarks/gpu_plan.py` on {document['device']}", ""]
    lines += [f"{document['date']}, {document['commit']}; {versions}. Cells: predicted / measured (error).", ""]
    for name, errors in document["summary"].items():
        if isinstance(errors, dict):
            median, worst = f"{errors['median_error']:.1%}", f"{errors['worst_error']:.1%}"
            lines.append(f"- {name}: median error {median}, worst {worst} over {errors['cases']} cases")
    lines += [f"- ran out of memory where it should have fitted: {document['summary']['dangerous']}", ""]
    return "\n".join(lines) + "\n"


def save(rows: list[dict[str, Any]], device: str, folder: Path) -> None:
    """Write what there is so far, as JSON and Markdown."""
    from accel_scale.reporting.summary import write_summary

    name = "gpu_plan_" + re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    with tempfile.TemporaryDirectory() as temporary:
        content = {"device": device, "summary": summary(rows), "rows": rows}
        document = json.loads(write_summary(temporary, content).read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / f"{name}.md").write_text(heading(document) + table(rows))


def main() -> None:
    """Run the cases that fit into the time and write the results after each."""
    import torch

    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=GPU_MODELS if on_gpu else CPU_MODELS)
    seconds = 540.0 if on_gpu else 45.0
    parser.add_argument("--seconds", type=float, default=seconds, help="No new case is started after this time.")
    parser.add_argument("--max_cases", type=int, default=None)
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--case", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(Case(**json.loads(options.case)))))
        return
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    card_bytes = torch.cuda.get_device_properties(0).total_memory if on_gpu else None
    started, rows = time.perf_counter(), []
    for case in cases(tuple(options.models), on_gpu=on_gpu)[: options.max_cases]:
        left = options.seconds - (time.perf_counter() - started)
        if left <= 0:
            print(f"time is up; not run: {case.label}")
            continue
        predicted = predict(case, on_gpu=on_gpu)
        if card_bytes is not None and (predicted["low_bytes"] or 0) > card_bytes:
            print(f"cannot fit by far; not run: {case.label}")
            continue
        should_fit = card_bytes is None or (predicted["high_bytes"] or 0) <= card_bytes
        measured = measure_apart(case, limit=max(60.0, left))
        rows.append(
            {
                "label": case.label,
                "case": asdict(case),
                "predicted": predicted,
                "measured": measured,
                "should_fit": should_fit,
            }
        )
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        save(rows, device, options.results)


if __name__ == "__main__":
    main()
