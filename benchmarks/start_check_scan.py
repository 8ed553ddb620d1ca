"""Run the start check on every causal language model of transformers that can be built small, and write the results.

    python benchmarks/start_check_scan.py                  # one process: about 8 minutes of one core
    python benchmarks/start_check_scan.py --policies       # activation checkpointing of those
    torchrun --nproc_per_node 2 benchmarks/start_check_scan.py --fsdp2  # the same twins, sharded over two processes
    python benchmarks/start_check_scan.py --only llama bloom --print        # some of them, nothing is written

Each architecture uses its configuration class's defaults, shrunk as the start check shrinks a real model. Results are
written to `benchmarks/results/start_check.json` after every architecture, and the table in `docs/start-check.md` is
made from that file. Existing results for the same versions are not rerun unless `--again` is given.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from trl import ModelConfig

from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.attention import resolve_attention
from accel_scale.modeling.loading import skeleton_of
from accel_scale.optimization.fast_loss import add_fast_lm_head
from accel_scale.quiet import quiet_imports
from accel_scale.reporting.summary import installed_versions
from accel_scale.start_check import PlannedRun, Verdict, check_start
from accel_scale.start_check.flash_on_cpu import attention_on_cpu
from accel_scale.start_check.steps import Step
from accel_scale.start_check.twin import tiny_config, undisturbed
from accel_scale.start_check.twin_check import TwinCheck

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "start_check.json"
TABLE = REPOSITORY / "docs" / "start-check.md"
BEGIN, END = "<!-- start_check_scan: begin -->", "<!-- start_check_scan: end -->"
METHODS = ("full", "lora")
POLICIES = ("full", "selective")
COLUMNS = {
    "name": "model type", "packing": "packed rows", "full": "full", "lora": "LoRA", "full_fsdp2": "full, FSDP2",
    "lora_fsdp2": "LoRA, FSDP2", **{f"checkpointing_{kind}": f"checkpointing {kind}" for kind in POLICIES},
}  # fmt: skip
# Settings of Qwen 4's indexed attention.
_INDEXER = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 128,
    "indexer_compress_ratio": 4,
}  # fmt: skip
# Values that a configuration class leaves out, or sets to a size that does not match the rest.
_FILLED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 5e5, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"num_key_value_heads": 8, "head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_embds": False},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
}


def architectures() -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield model type and configuration of every causal language model, with encoders as decoders."""
    for config_class in dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING):
        name = config_class.model_type
        try:
            config = config_class(**_FILLED.get(name, {}))
        except Exception:  # its own validation may raise anything
            continue  # the class has no usable defaults
        if getattr(config, "is_encoder_decoder", False):
            continue
        if getattr(config, "is_decoder", None) is False:
            config.is_decoder = True
        yield name, config


def planned(config: PreTrainedConfig, method: str, rows: Any) -> PlannedRun:
    """The run that sft.py would plan for `config` on a CPU, without flags that need more than a configuration."""
    return PlannedRun(
        config=config,
        attention=resolve_attention(
            None, device=CPU, dtype=torch.float32, packing=rows == "packed", model_config=config
        ),
        rows=rows,
        policy=CheckpointingPolicy("none"),
        adapter=adapter_of(config) if method == "lora" else None,
    )


def adapter_of(config: PreTrainedConfig) -> Any:
    """The recipe's default adapters; modules without one are found in a model with a few layers of every kind."""
    from accel_scale.modeling.adapters import lora_config

    skeleton = skeleton_of(tiny_config(config))
    return lora_config(ModelConfig(lora_task_type="CAUSAL_LM"), skeleton, dropout_is_set=False)


def outcome(verdict: Verdict) -> str:
    """The check's decision in a few words."""
    skipped = next((note for note in verdict.notes if note.startswith("start check: skipped")), None)
    if skipped:
        return skipped
    return "own logits" if verdict.loss_from_logits else "equal"


def check_architecture(config: PreTrainedConfig) -> dict[str, Any]:
    """Check packing, then full and LoRA training with packed rows if accepted, else with padded rows."""
    found: dict[str, Any] = {}
    rows = "packed"
    try:
        check_start(planned(config, "full", rows))
        found["packing"] = "isolated"
    except ConfigError as error:
        found["packing"], rows = f"refused: {error.problem}", "padded"
    found["rows"] = rows
    for method in METHODS:
        try:
            verdict = check_start(planned(config, method, rows))
        except ConfigError as error:
            found[method] = f"refused: {error.problem}"
            continue
        except Exception as error:  # from the configuration, before there is a model
            found[method] = f"start check: skipped, {type(error).__name__}: {error}"
            continue
        found[method] = outcome(verdict)
        if verdict.untrained:
            found[f"{method}_untrained"] = len(verdict.untrained)
        if verdict.exclude_modules:
            found["without_adapters"] = list(verdict.exclude_modules)
    return found


def check_policies(config: PreTrainedConfig, known: dict[str, Any]) -> dict[str, Any]:
    """Check that each checkpointing policy preserves the gradients, with the known rows and loss.

    Uses one small model and three passes, with the first attention that can take a step.
    """
    if known["full"] not in ("equal", "own logits"):
        return {f"checkpointing_{kind}": "not run" for kind in POLICIES}
    run = planned(config, "full", known["rows"])
    for attention in dict.fromkeys((run.attention, "sdpa", "eager")):
        with undisturbed(), attention_on_cpu(attention) as on_cpu:
            check = TwinCheck(dataclasses.replace(run, attention=attention), on_cpu)
            with contextlib.suppress(ConfigError):
                own = check.own_step()
                add_fast_lm_head(check.base, from_logits=known["full"] == "own logits")
                return {f"checkpointing_{kind}": _with_policy(check, own, kind) for kind in POLICIES}
    raise RuntimeError(f"{config.model_type} takes no step any more")


def _with_policy(check: TwinCheck, own: Step, kind: str) -> str:
    check.run = dataclasses.replace(check.run, policy=CheckpointingPolicy(kind))
    try:
        apply_checkpointing(check.model, check.run.policy)
    except ConfigError as error:
        return f"refused: {error.problem}"
    step, why = check.compared(own)
    return "equal" if step is not None else f"refused: {check.policy_changes_gradients(own, why)}"


def read_results() -> dict[str, Any]:
    """The results file, or empty results if it is from other versions."""
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    if known.get("versions") != versions():
        return {"versions": versions(), "architectures": {}}
    return known


def versions() -> dict[str, str]:
    """Versions of the libraries whose behaviour the table shows."""
    installed = installed_versions()
    return {name: installed[name] for name in ("torch", "transformers", "peft", "trl")}


def record(name: str, found: dict[str, Any]) -> None:
    """Add an architecture's results to both files; scans may run in parallel."""
    with (REPOSITORY / "benchmarks" / "start_check_scan.py").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = read_results()
        results["architectures"].setdefault(name, {}).update(found)
        write(results)


def write(results: dict[str, Any]) -> None:
    """Write both files."""
    results["architectures"] = dict(sorted(results["architectures"].items()))
    _replace(RESULTS, json.dumps(results, indent=1) + "\n")
    text = TABLE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _replace(TABLE, before + BEGIN + "\n" + table(results) + END + rest.split(END)[1])


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically, because another scan may be reading it."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def builds_small(found: dict[str, Any]) -> bool:
    """True if there was a twin that took a step."""
    return not str(found.get("full", "")).startswith("start check: skipped")


def table(results: dict[str, Any]) -> str:
    """The Markdown between the page's markers."""
    built = {name: found for name, found in results["architectures"].items() if builds_small(found)}
    others = sorted(set(results["architectures"]) - set(built))
    stack = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"{len(built)} architectures, {stack}.",
        "",
        f"| {' | '.join(COLUMNS.values())} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    for name, found in built.items():
        cells = [_short({"name": name, **found}.get(key, "not run")) for key in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    refusals = sorted({f"- {name}: {text}" for name, found in built.items() for text in _refusals(found)})
    lines += ["", "What is refused, and why:", "", *refusals, ""]
    lines += [f"No small model can be built of: {', '.join(others)}.", ""] if others else []
    return "\n".join(lines)


def _short(text: str) -> str:
    return text.split(":")[0].replace("start check", "not run")


def _refusals(found: dict[str, Any]) -> list[str]:
    texts = [text for text in found.values() if isinstance(text, str) and text.startswith(("refused: ", "fails: "))]
    return [" ".join(text.removeprefix("refused: ").split()) for text in texts]


def main() -> None:
    """Scan the requested architectures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, help="model types")
    parser.add_argument("--fsdp2", action="store_true", help="shard the twins over the processes of torchrun")
    parser.add_argument("--policies", action="store_true", help="activation checkpointing, of what has been run")
    parser.add_argument("--again", action="store_true", help="also what has been run")
    parser.add_argument("--print", action="store_true", help="write nothing")
    options = parser.parse_args()
    quiet_imports()
    torch.set_num_threads(1)
    speaks = os.environ.get("RANK", "0") == "0"
    if options.fsdp2:
        from start_check_sharded import check_sharded, process_group

        process_group()
    done = read_results()["architectures"]  # read once, since the processes of FSDP2 must agree
    for name, config in architectures():
        if options.only is not None and name not in options.only:
            continue
        known = done.get(name, {})
        if options.fsdp2:
            is_due = options.again or "full_fsdp2" not in known
            found = check_sharded(config) if is_due else {}
        elif options.policies:
            is_due = builds_small(known) and (options.again or f"checkpointing_{POLICIES[-1]}" not in known)
            found = check_policies(config, known) if is_due else {}
        else:
            is_due = options.again or "full" not in known
            found = check_architecture(config) if is_due else {}
        gc.collect()
        if found and speaks:
            print(name, found, flush=True)
            if not options.print:
                record(name, found)


if __name__ == "__main__":
    main()
