"""Stage `speed`: compares recipes/sft.py with TRL's script at its fastest: same model, rows and tokens per step."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from gpu_stages.box import Cases, Wrong, expect
from gpu_stages.inputs import llama_config, written_documents, written_model
from gpu_stages.recipe import REPOSITORY, words

_LARGE_CARD = 60 * 2**30  # room for 1.5B weights, gradients and AdamW's states, with activations


def speed(cases: Cases) -> None:
    """Measure each in its own process, then the ratio."""
    size = ("1.5B" if card_bytes() >= _LARGE_CARD else "0.5B") if cases.on_gpu else "tiny"
    model = written_model(cases.folder, size, cases.device)
    written_documents(cases.folder / "data", 6000 if cases.on_gpu else 200)
    runs: dict[str, dict[str, Any]] = {}
    for name in ("TRL", "accel-scale"):
        label = f"{name}{with_what(cases) if name == 'TRL' else ''}, {size}"
        cases.case(label, lambda n=name: one(cases, n, model, size, runs))
    cases.case("ratio", lambda: ratio(cases, runs))


def card_bytes() -> int:
    """Memory of the first GPU."""
    return int(torch.cuda.get_device_properties(0).total_memory)


def has(package: str) -> bool:
    """True if the package is installed."""
    return importlib.util.find_spec(package) is not None


def with_what(cases: Cases) -> str:
    """Text on the options that make TRL's script fast here."""
    extras = [name for name, package in (("Liger", "liger_kernel"), ("flash-attn", "flash_attn")) if has(package)]
    return f" with packing{''.join(f', {name}' for name in extras) if cases.on_gpu else ', fp32'}"


def one(cases: Cases, name: str, model: Path, size: str, runs: dict[str, dict[str, Any]]) -> str:
    """Measure one contestant: tokens/s by the device's clock after the first steps, MFU, and peak memory."""
    try:
        result = measured_run(cases, name, model)
    except Wrong:
        if name != "TRL" or not cases.on_gpu:
            raise
        result = measured_run(cases, name, model, gradient_checkpointing=True)  # it may not fit otherwise
    runs[name] = result
    (cases.folder / f"{name}.json").write_text(json.dumps(result))  # for the ratio after an interrupted stage
    found = f"{result['tokens_per_second']:,.0f} tokens/s"
    if used := utilisation(size, result["tokens_per_second"], cases):
        found += f", MFU {used:.1%}"
    if result["peak_device_bytes"]:
        found += f", {result['peak_device_bytes'] / 2**30:.2f} GiB allocated"
    return f"{found}, last loss {result['loss']:.3f}"


def measured_run(cases: Cases, name: str, model: Path, **extra: object) -> dict[str, Any]:
    """Run the script with `benchmarks/measured_run.py`."""
    import trl

    length, micro_batch, steps = (1024, 8, 16) if cases.on_gpu else (128, 4, 8)
    flags: dict[str, object] = {
        "model_name_or_path": model, "max_length": length, "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": 1, "max_steps": steps, "logging_steps": 1, "learning_rate": 1e-4,
        "packing": True, "seed": 42, "output_dir": cases.folder / f"out_{name}", "save_strategy": "no",
    }  # fmt: skip
    if name == "TRL":
        script = Path(trl.__file__).parent / "scripts" / "sft.py"
        flags |= {"dataset_name": cases.folder / "data", "report_to": "none", "gradient_checkpointing": False}
        if not cases.on_gpu:
            flags |= {"use_cpu": True, "bf16": False}
        elif has("liger_kernel"):
            flags["use_liger_kernel"] = True
        if cases.on_gpu and has("flash_attn"):
            flags["attn_implementation"] = "flash_attention_2"
    else:
        script = REPOSITORY / "recipes" / "sft.py"
        flags["dataset_name"] = cases.folder / "data" / "documents.jsonl"
    report = cases.folder / f"report_{name}.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "measured_run.py"), str(report), str(script)]
    command += words(flags | extra)
    done = subprocess.run(command, cwd=cases.folder, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise Wrong(f"status {done.returncode}: {lines[-1][:240] if lines else 'no output'}")
    return rate(json.loads(report.read_text()))


def rate(report: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second after the third step, when kernels have been chosen and compiled."""
    ended = {step: seconds for step, seconds, _ in report["steps"]}
    logs = report["logs"][2:]
    (first, tokens_first, _), (last, tokens_last, loss) = logs[0], logs[-1]
    return {
        "tokens_per_second": (tokens_last - tokens_first) / (ended[last] - ended[first]),
        "peak_device_bytes": report.get("peak_device_bytes"),
        "loss": loss,
    }


def utilisation(size: str, tokens_per_second: float, cases: Cases) -> float | None:
    """MFU: 6·N FLOPs per token (PaLM, appendix B, without attention) over the card's dense peak."""
    from accel_scale.errors import ConfigError
    from accel_scale.facts.hardware import detect_local
    from accel_scale.launching.machine import detect_device
    from accel_scale.planning.models.model_config import facts_from_config

    machine = detect_local()
    if machine is None:
        return None
    dtype = "fp16" if detect_device(cases.device).default_precision == "fp16" else "bf16"
    try:
        peak = machine.gpu.flops(dtype)
    except ConfigError:  # not in the catalogue
        return None
    return 6 * facts_from_config(llama_config(size).to_dict(), name=size).num_params * tokens_per_second / peak


def ratio(cases: Cases, runs: dict[str, dict[str, Any]]) -> str:
    """Ratio of ours to theirs; nothing is claimed at toy size."""
    for name in ("TRL", "accel-scale"):
        path = cases.folder / f"{name}.json"
        if name not in runs and path.is_file():
            runs[name] = json.loads(path.read_text())
    if len(runs) < 2:
        raise Wrong("one of the two has not run")
    found = runs["accel-scale"]["tokens_per_second"] / runs["TRL"]["tokens_per_second"]
    if not cases.on_gpu:
        return f"{found:.2f} × TRL's tokens per second; a toy, nothing is claimed"
    return expect(found >= 1.0, f"{found:.2f} × TRL's tokens per second")
