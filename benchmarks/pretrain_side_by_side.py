"""Pretraining side by side: recipes/pretrain.py, litgpt's loop, HF Trainer, and a bare PyTorch loop as upper limit.

    python benchmarks/pretrain_side_by_side.py --litgpt_python /tmp/litgpt/bin/python  # writes benchmarks/results/
    python benchmarks/pretrain_side_by_side.py --bf16
    python benchmarks/pretrain_side_by_side.py --turns 3 --results /tmp/results

litgpt pins its own library versions and needs a separate environment (python -m venv, pip install torch litgpt
requests); without --litgpt_python it is left out, as the table notes. The same for all: a Llama of one shape with
random weights, the same tokens in rows of one length, micro-batch, precision (bf16 autocast on fp32 weights, or fp32),
fused AdamW with the same settings, gradient clipping, number of threads, and attention over whole rows. The rest
differs:

* bare loop: the same transformers model with this project's attention and loss, rows as tensors in memory, no
  logging, checks or data loading: the most a loop could reach with the kernels that torch chooses by itself;
* bare loop, HF loss: the same with the model's own attention (sdpa) and loss;
* ours: the recipe, from text to validation, guard on, logging every step; with and without --torch_compile. In fp32
  it uses oneDNN on CPUs that MKL does not support well (`use_onednn_in_fp32`), while the others use MKL;
* HF Trainer: a data set of the same rows, logging every step;
* litgpt: its own pretraining function and model code (which always compiles), with fused AdamW passed to it. It starts
  from other random weights, with which the bare loop's loss falls faster too: compare its speed only.

The contestants take turns of a few steps while the others are paused (benchmarks/turns.py), after ten uncounted steps.
Ratios are between turns of one round, seconds apart, because machines drift; the table has the median of the ratios
and their middle half. MFU is relative to square matrix products measured in the same run. The default precision is
the one with faster matrix products here, since not every CPU gains from bf16.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from machine import machine  # noqa: E402
from pretrain_contestants import CONTESTANTS, SHAPE, WARM_UP_STEPS, work  # noqa: E402
from turns import Contestant, race  # noqa: E402


def make_job(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the text, the same text as rows of tokens, the tokenizer and the config."""
    import numpy

    from accel_scale.data.default import default_model_path, default_pretraining_text
    from accel_scale.modeling.loading import load_tokenizer

    tokenizer = load_tokenizer(default_model_path())
    text = default_pretraining_text(str(folder))
    wanted = options.steps * options.micro_batch * (options.length + 1)
    ids: list[int] = []
    for document in _documents(text):
        ids += [*tokenizer(document)["input_ids"], tokenizer.eos_token_id]
        if len(ids) >= wanted:
            break
    rows = numpy.array(ids[:wanted], dtype=numpy.int32).reshape(-1, options.length + 1)
    numpy.save(folder / "rows.npy", rows)
    config = {**SHAPE, "model_type": "llama", "vocab_size": len(tokenizer), "tie_word_embeddings": False}
    config |= {"max_position_embeddings": options.length}
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "rows": str(folder / "rows.npy"), "text": text, "tokenizer": default_model_path(),
        "config": str(folder / "config.json"), "vocab_size": len(tokenizer), "length": options.length,
        "micro_batch": options.micro_batch, "steps": options.steps, "threads": options.num_threads,
        "bf16": options.bf16,
    }  # fmt: skip


def _documents(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def start(name: str, job: dict[str, Any], folder: Path, python: str) -> Contestant:
    """Start one contestant."""
    folder.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "TOKENIZERS_PARALLELISM": "false"}
    words = [python, __file__, "--worker", name, "--job", json.dumps({**job, "folder": str(folder)})]
    return Contestant(name, words, environment, folder / "log")


def check_litgpt(python: str) -> None:
    """Check early that litgpt can be imported: it runs last, and minutes would be lost."""
    done = subprocess.run([python, "-c", "import litgpt.pretrain"], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SystemExit(f"{python} cannot import litgpt.pretrain ({last}). Mend that environment first.")


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all contestants in turns."""
    import torch
    from transformers import LlamaConfig

    from accel_scale.launching.cpu_process import use_onednn_in_fp32
    from accel_scale.measuring.peak_flops import measured_peak_flops, model_flops

    if options.litgpt_python:
        check_litgpt(options.litgpt_python)
    torch.set_num_threads(options.num_threads)
    use_onednn_in_fp32()  # the peak of the faster library
    peaks = {bf16: measured_peak_flops("cpu", torch.bfloat16 if bf16 else torch.float32) for bf16 in (True, False)}
    if options.bf16 is None:
        options.bf16 = peaks[True] > peaks[False]
    job = make_job(folder, options)
    pythons = dict.fromkeys(CONTESTANTS, sys.executable) | {"litgpt": options.litgpt_python}
    names = [name for name in CONTESTANTS if pythons[name]]
    starts = [functools.partial(start, name, job, folder / str(i), pythons[name]) for i, name in enumerate(names)]
    print(f"{'bf16' if options.bf16 else 'fp32'}; starting {', '.join(names)}", flush=True)
    found = race(starts, turns=options.turns, steps=options.turn_steps)
    config = LlamaConfig(**SHAPE, vocab_size=job["vocab_size"], tie_word_embeddings=False)
    per_token, _ = model_flops(config, sequence_length=options.length, num_params=0)
    sizes = {name: value for name, value in job.items() if not isinstance(value, str)}
    sizes |= {"turns": options.turns, "turn_steps": options.turn_steps}
    results = {"machine": machine(), "job": sizes, "peak_flops": peaks[options.bf16], "flops_per_token": per_token}
    return results | {"runs": dict(zip(names, found, strict=True))}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    info, job, runs = results["machine"], results["job"], results["runs"]
    lines = [
        "# Pretraining side by side", "",
        f"{job['threads']} cores of {info['cpu']}, torch {info['torch']}, transformers {info['transformers']}, "
        f"accelerate {info['accelerate']}, {info['date']}, commit {info['commit']}, load average "
        f"{info['load_average']:.1f} at the end; {job['turns']} turns of {job['turn_steps']} steps each. A Llama of 6 "
        f"layers of 256, {job['micro_batch']} × {job['length']} tokens a step, "
        f"{'bf16 autocast' if job['bf16'] else 'fp32'}. "
        "Made by `python benchmarks/pretrain_side_by_side.py`, whose first lines say what is equal.", "",
        "| | tokens/s | × bare loop | middle half of the rounds | MFU | peak memory, MiB | loss, last 10 steps |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, run in runs.items():
        speed = job["turn_steps"] * job["micro_batch"] * job["length"] / statistics.median(run["seconds"])
        ratios = [bare / own for own, bare in zip(run["seconds"], runs["bare loop"]["seconds"], strict=True)]
        lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
        mfu = speed * results["flops_per_token"] / results["peak_flops"]
        lines.append(
            f"| {name} | {speed:,.0f} | {middle:.3f} | {lower:.3f} to {upper:.3f} "
            f"| {mfu:.0%} | {run['peak_resident_bytes'] / 2**20:,.0f} | {run['loss']:.3f} |"
        )
    lines += ["", f"The matrix-product peak measured in the same run is {results['peak_flops'] / 1e9:,.0f} GFLOP/s."]
    if "litgpt" not in runs:
        lines.append("litgpt was not measured: no --litgpt_python.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--turn_steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--litgpt_python", default=None, help="Python of an environment with litgpt.")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--worker", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--pipes", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = WARM_UP_STEPS + options.turns * options.turn_steps
    if options.worker:
        work(options.worker, {**options.job, "pipes": options.pipes})
        return
    with tempfile.TemporaryDirectory() as folder:
        results = compare(options, Path(folder))
    options.results.mkdir(parents=True, exist_ok=True)
    name = f"pretrain_side_by_side_{'bf16' if options.bf16 else 'fp32'}"
    (options.results / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.results / f"{name}.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
