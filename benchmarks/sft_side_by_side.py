"""Fine-tuning side by side: TRL's script with defaults and tuned by hand, other tools, and recipes/sft.py.

    python benchmarks/sft_side_by_side.py                    # writes benchmarks/results/sft_side_by_side.{json,md}
    python benchmarks/sft_side_by_side.py --llama_factory_python lf/bin/python --torchtune_python tt/bin/python
    python benchmarks/sft_side_by_side.py --workloads embedded --repeats 1 --num_rows 400 --results /tmp/results

The same for all: model, rows, one pass over them, learning rate and schedule, optimizer, and tokens per optimizer step
(padded contestants accumulate as many micro-batches as needed). Everything else differs. Each contestant runs in its
own process, repeats are interleaved, and medians are compared. Speed is tokens without padding ÷ wall time from the
first logged step to the last, which excludes start-up but includes logging and waiting for data; tokens per CPU-second
give the same if other work disturbs the clock. Memory is the high-water mark of resident memory during training. The
evaluation loss is computed afterwards from the saved folders, by one function in fp32. `--workloads gsm8k` takes an
hour on a CPU without bf16 arithmetic, TRL's default.

LLaMA-Factory and torchtune pin their own library versions, so each needs a separate environment (python -m venv, a CPU
build of torch, and the tool); without its flag a tool is left out, as the table notes. Each takes part with its
defaults and with the fastest of some tunings (benchmarks/sft_tools.py). torchtune has no linear schedule, so it uses
its own cosine one; it drops the last incomplete batch. axolotl is not included; the table says why.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from machine import PACKAGES, machine  # noqa: E402
from sft_tools import NOT_MEASURED, TOOLS, Contestant, documents_per_step, versions  # noqa: E402
from sft_workloads import WORKLOADS, Workload, document_lengths, tokenize  # noqa: E402

LOGGING_STEPS = 1
_FIGURES = (
    "tokens_per_second",
    "tokens_per_cpu_second",
    "training_resident_bytes",
    "peak_resident_bytes",
    "evaluation_loss",
)


def contestants(workload: Workload) -> dict[str, list[Contestant]]:
    """Contestants by group: `trl_defaults`, the candidates for `trl_tuned` and `trl_mixed`, and `accel_scale`."""
    import trl

    lengths = document_lengths(workload)
    documents = documents_per_step(workload)
    common = (
        f"--model_name_or_path={workload.model}",
        "--num_train_epochs=1",
        "--seed=42",
        "--report_to=none",
        f"--logging_steps={LOGGING_STEPS}",
        *workload.shared_flags,
    )
    trl_script = Path(trl.__file__).parent / "scripts" / "sft.py"
    # On a CPU, transformers allows bf16 (TRL's default) only with --use_cpu.
    trl_common = (*common, f"--dataset_name={workload.data}", "--use_cpu=True")

    def padded(name: str, micro_batch: int, *flags: str) -> Contestant:
        accumulation = max(1, round(documents / micro_batch))
        batch = (f"--per_device_train_batch_size={micro_batch}", f"--gradient_accumulation_steps={accumulation}")
        return Contestant(name, trl_script, (*trl_common, *batch, *flags))

    def packed(name: str, max_length: int, *flags: str) -> Contestant:
        accumulation = max(1, workload.tokens_per_step // max_length)
        batch = ("--per_device_train_batch_size=1", f"--gradient_accumulation_steps={accumulation}")
        return Contestant(
            name, trl_script, (*trl_common, "--packing=True", f"--max_length={max_length}", *batch, *flags)
        )

    by_length = "--train_sampling_strategy=group_by_length"
    plain = "--gradient_checkpointing=False"
    half, single = "--dtype=bfloat16", "--bf16=False"
    longest = max(lengths)
    short_rows = next(size for size in (256, 512, 1024, 2048) if size >= min(longest, 2048))
    ours = REPOSITORY / "recipes" / "sft.py"
    our_data = f"--dataset_name={workload.data / 'train.jsonl'}"
    return {
        "trl_defaults": [padded("TRL defaults", 8)],
        "trl_tuned": [
            padded("micro-batch 16, by length, bf16 weights", 16, plain, by_length, half),
            padded("micro-batch 16, by length, fp32", 16, plain, by_length, single),
            padded("micro-batch 32, by length, fp32", 32, plain, by_length, single),
            packed(f"packed rows of {short_rows}, fp32", short_rows, plain, single),
        ],
        # In the precision of the defaults, TRL's and ours: fp32 weights, bf16 arithmetic.
        "trl_mixed": [
            padded("micro-batch 16, by length", 16, plain, by_length),
            padded("micro-batch 32, by length", 32, plain, by_length),
            packed(f"packed rows of {short_rows}", short_rows, plain),
        ],
        "accel_scale": [
            Contestant("accel-scale defaults", ours, (*common, our_data, *workload.our_flags)),
            Contestant("accel-scale, bf16 weights", ours, (*common, our_data, *workload.our_flags, half)),
        ],
    }


def run_once(contestant: Contestant, workload: Workload, folder: Path, *, num_threads: int) -> dict[str, Any]:
    """Train once in a separate process; returns speed, memory and losses."""
    folder.mkdir(parents=True)
    report_path = folder / "report.json"
    command = contestant.command(report_path, folder / "model")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if contestant.python != sys.executable:  # its environment lacks this project and its benchmarks
        environment["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'benchmarks'}"
    process = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{contestant.name} failed:\n{process.stdout[-3000:]}\n{process.stderr[-3000:]}")
    report = json.loads(report_path.read_text())
    ended = {step: (wall, cpu) for step, wall, cpu in report["steps"]}
    (first, tokens_first, _), (last, tokens_last, _) = report["logs"][0], report["logs"][-1]
    wall_seconds, cpu_seconds = (b - a for a, b in zip(ended[first], ended[last], strict=True))
    return {
        "tokens_per_second": (tokens_last - tokens_first) / wall_seconds,
        "tokens_per_cpu_second": (tokens_last - tokens_first) / cpu_seconds,
        "training_resident_bytes": report["peak_resident_bytes"] - report["resident_bytes_before"],
        "peak_resident_bytes": report["peak_resident_bytes"],
        "num_steps": len(ended),
        "num_tokens": report["logs"][-1][1],
        "losses": [[tokens, loss] for _, tokens, loss in report["logs"]],
        "evaluation_loss": evaluation_loss(folder / "model" / contestant.saved_in, workload),
    }


def evaluation_loss(model_path: Path, workload: Workload, num_documents: int = 128) -> float:
    """Mean cross-entropy over the labelled tokens of held-out documents, one document at a time, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, mask in tokenize(workload, "heldout")[:num_documents]:
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
            kept = torch.tensor(mask[1:], dtype=torch.bool)
            targets = torch.tensor(ids[1:])[kept]
            total += torch.nn.functional.cross_entropy(logits[kept], targets, reduction="sum").item()
            count += int(kept.sum())
    return total / count


# ── Comparison ───────────────────────────────────────────────────────────────────────────────────────────────────────


def tuned(candidates: list[Contestant], workload: Workload, folder: Path, num_threads: int) -> dict[str, Any]:
    """Run every candidate; returns its figures by name."""
    tried = {}
    for index, candidate in enumerate(candidates):
        result = run_once(candidate, workload, folder / str(index), num_threads=num_threads)
        tried[candidate.name] = {key: result[key] for key in _FIGURES}
        print(f"  tuning: {candidate.name}: {result['tokens_per_second']:,.0f} tokens/s", flush=True)
    return tried


def compare(
    workload: Workload, *, repeats: int, num_threads: int, folder: Path, tune: bool, pythons: dict[str, str]
) -> dict[str, Any]:
    """Choose the fastest tuning of every tool, then run all in turns; `pythons` are the other tools' interpreters."""
    groups = contestants(workload)
    families: dict[str, tuple[Contestant | None, list[Contestant]]] = {
        "TRL": (groups["trl_defaults"][0], groups["trl_tuned"]),
        "TRL in mixed precision": (None, groups["trl_mixed"]),
    }
    for key, python in pythons.items():
        defaults, *candidates = TOOLS[key].contestants(workload, python)
        families[TOOLS[key].title] = replace(defaults, name=f"{TOOLS[key].title} defaults"), candidates
    chosen, tried = [], {}
    for title, (defaults, candidates) in families.items():
        chosen += [defaults] if defaults else []
        if tune:
            tried[title] = tuned(candidates, workload, folder / f"tuning {title}", num_threads)
            best = max(candidates, key=lambda c: tried[title][c.name]["tokens_per_second"])
            chosen.append(replace(best, name=f"{title} tuned ({best.name})"))
    chosen += groups["accel_scale"]
    runs: dict[str, list[dict[str, Any]]] = {contestant.name: [] for contestant in chosen}
    for repeat in range(repeats):
        for index, contestant in enumerate(chosen):
            result = run_once(contestant, workload, folder / f"run{repeat}_{index}", num_threads=num_threads)
            runs[contestant.name].append(result)
            print(f"  {contestant.name}: {result['tokens_per_second']:,.0f} tokens/s", flush=True)
    return {
        "description": workload.description,
        "contestants": [
            {
                "name": contestant.name,
                "flags": [flag.replace(str(folder), "…") for flag in contestant.flags],
                **{key: statistics.median(run[key] for run in runs[contestant.name]) for key in _FIGURES},
                "runs": runs[contestant.name],
            }
            for contestant in chosen
        ],
        "tuning": tried,
    }


def notes(results: dict[str, Any]) -> list[str]:
    """Notes on the versions of tools that took part, and on why others did not."""
    found = []
    for key, tool in TOOLS.items():
        versions = results["tools"].get(key)
        said = ", ".join(f"{name} {version}" for name, version in versions.items()) if versions else ""
        found.append(f"{tool.title}: {said}." if said else f"{tool.title} was not measured: no --{key}_python.")
    return [*found, NOT_MEASURED]


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    info = results["machine"]
    versions = ", ".join(f"{name} {info[name]}" for name in PACKAGES)
    lines = [
        "# Fine-tuning side by side",
        "",
        f"{results['num_threads']} cores of {info['cpu']}, {versions}, Python {info['python']}, {info['date']}, "
        f"commit {info['commit']}, load average {info['load_average']:.1f} at the start; {results['repeats']} "
        "interleaved runs each, medians. "
        "Made by `python benchmarks/sft_side_by_side.py`, whose first lines say what is equal and how it is measured.",
        *("".join(("\n", note)) for note in notes(results)),
    ]
    for name, workload in results["workloads"].items():
        rows = workload["contestants"]
        base = rows[0]
        lines += ["", f"## {name}: {workload['description']}", ""]
        heads = ("", "tokens/s without padding", "×", "tokens/CPU-second", "×", "peak memory, MiB")
        heads += ("of it by training, MiB", "evaluation loss")
        lines += [f"| {' | '.join(heads)} |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
        for row in rows:
            cells = [row["name"]]
            for key in ("tokens_per_second", "tokens_per_cpu_second"):
                cells += [f"{row[key]:,.0f}", f"{row[key] / base[key]:.2f}"]
            cells += [f"{row[key] / 2**20:,.0f}" for key in ("peak_resident_bytes", "training_resident_bytes")]
            lines.append(f"| {' | '.join(cells)} | {row['evaluation_loss']:.4f} |")
        for title, tunings in workload["tuning"].items():
            tried = ", ".join(f"{key} {value['tokens_per_second']:,.0f}" for key, value in tunings.items())
            lines += ["", f"Tunings of {title} that were tried, in tokens/s: {tried}."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Entry point; returns the content of the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["embedded"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--num_rows", type=int, default=None, help="Use only the first rows of each data set.")
    parser.add_argument("--no_tuning", action="store_true", help="Leave the tuned contestants out.")
    for key, tool in TOOLS.items():
        parser.add_argument(f"--{key}_python", help=f"Python of an environment with {tool.title}.")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args(argv)
    pythons = {key: path for key in TOOLS if (path := getattr(options, f"{key}_python"))}
    if pythons and "gsm8k" in options.workloads:
        parser.error("the other tools read chat messages, which gsm8k has not: compare them on the embedded workload.")
    results: dict[str, Any] = {
        "machine": machine(),
        "num_threads": options.num_threads,
        "repeats": options.repeats,
        "tools": {key: versions(python, TOOLS[key]) for key, python in pythons.items()},
        "workloads": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.workloads:
            print(name, flush=True)
            folder = Path(temporary) / name
            workload = WORKLOADS[name](folder, options.num_rows)
            results["workloads"][name] = compare(
                workload,
                repeats=options.repeats,
                num_threads=options.num_threads,
                folder=folder,
                tune=not options.no_tuning,
                pythons=pythons,
            )
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "sft_side_by_side.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.results / "sft_side_by_side.md").write_text(table(results))
    print(table(results))
    return results


if __name__ == "__main__":
    main()
