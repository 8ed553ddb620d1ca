"""Compare the plan of every causal language model of transformers with the peak of a real step on the CPU.

    python benchmarks/traced_models.py                  # one process: about 25 minutes of one core
    python benchmarks/traced_models.py --at_most 8      # goes on where the last call stopped
    python benchmarks/traced_models.py --only rwkv lfm2 --print

Each architecture uses its configuration class's defaults, shrunk as the start check shrinks a real model, but deeper.
It is planned as by `accel-scale plan`, on the tape or from a trace, and takes one whole optimizer step in which this
project's tracker counts every tensor: weights, gradients, states and activations. Results are written to
`benchmarks/results/traced_models.{json,md}` after every architecture. Existing results for the same versions are not
rerun, and failed ones only if named by `--only`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from os import environ
from pathlib import Path
from random import Random
from typing import Any

import torch
from planner_measure import _own_peak
from planner_models import draw_inputs
from start_check_scan import RESULTS as START_CHECK
from start_check_scan import architectures, versions
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedConfig

from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.adapter_targets import exclusion, freeze_other_parts, untrainable_linears
from accel_scale.modeling.loading import skeleton_of
from accel_scale.modeling.model_class import dropouts_of, language_model_class
from accel_scale.optimization.fast_loss import add_fast_lm_head
from accel_scale.optimization.optimizers import create_optimizer
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.traced import facts_of_any
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.families import has_kernel
from accel_scale.shrinking.shrink import shrink_model_config

RESULTS = Path(__file__).resolve().parent / "results" / "traced_models"
LAYERS = 4
SETUPS = {
    "full": {"method": "full", "precision": "fp32", "checkpointing": "none"},
    "lora": {"method": "lora", "precision": "fp32", "checkpointing": "full"},  # none if the class has no checkpointing
    "recomputed": {"method": "full", "precision": "fp32", "checkpointing": "selective"},
}


# Its default has fewer learned positions than the rows have tokens.
_FILLED: dict[str, dict[str, int]] = {"blenderbot": {"max_position_embeddings": 512}}


@dataclass(frozen=True)
class Row:
    """One architecture with one training setup: bytes, or why there are none."""

    model_type: str
    setup: str
    how: str
    measured_bytes: int = 0
    predicted_bytes: int = 0
    activation_share: float = 0.0
    problem: str = ""

    @property
    def error(self) -> float:
        """Signed error relative to the measured value."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0


def all_architectures() -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield the start check's architectures, models of text and images, and the decoders of encoder-decoders."""
    yield from architectures()
    for config_class in dict.fromkeys(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        with contextlib.suppress(Exception):  # its own validation may raise anything
            config = config_class()
            has_text_class = {config_class, type(config.get_text_config(decoder=True))} & {
                *MODEL_FOR_CAUSAL_LM_MAPPING
            }
            if not has_text_class and not config.is_encoder_decoder:
                yield config_class.model_type, config
    for config_class in dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING):
        with contextlib.suppress(Exception):  # its own validation may raise anything
            config = config_class(**_FILLED.get(config_class.model_type, {}))
            if config.is_encoder_decoder:
                config.is_encoder_decoder, config.is_decoder = False, True
                yield config_class.model_type, config


def takes_own_logits(model_type: str) -> bool:
    """True if the start check makes the recipe compute the loss from the model's own logits."""
    found = json.loads(START_CHECK.read_text(encoding="utf-8"))["architectures"].get(model_type, {})
    return str(found.get("full")) == "own logits"


def trained_model(config: PreTrainedConfig, setup: TrainingSetup) -> Any:
    """Build the model with random weights, as the recipe would train it."""
    import peft

    model = language_model_class(config).from_config(config, dtype=torch.float32)
    freeze_other_parts(model)
    if setup.trains_adapters:
        adapters = peft.LoraConfig(
            r=setup.lora.rank,
            target_modules="all-linear",
            exclude_modules=exclusion(untrainable_linears(skeleton_of(config))),
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, adapters)
    base = model.get_base_model() if setup.trains_adapters else model
    add_fast_lm_head(base, from_logits=takes_own_logits(config.model_type))
    if setup.checkpointing != "none":
        apply_checkpointing(model, CheckpointingPolicy.parse(setup.checkpointing))
    return model.train()


def set_patches(model: Any, input_ids: torch.Tensor) -> None:
    """Give BLT as many patches as its config's `patch_size` says: with random weights every byte begins one."""
    for patcher in (module for module in model.modules() if hasattr(module, "patch_lengths_from_entropies")):
        config = next(module.config for module in model.modules() if hasattr(module, "encoder_hash_tok_embedding"))
        with torch.no_grad():
            entropies = patcher(input_ids, patch_size=config.patch_size, threshold=0.0)[0]
        # The first two bytes always begin one, and a row with fewer patches is padded to the longest.
        wanted = input_ids.shape[1] // config.patch_size - 2
        highest = entropies[:, 1:].topk(wanted + 1, dim=1).values
        config.patching_threshold = float(highest[:, -1].max())


def measured_peak(config: PreTrainedConfig, setup: TrainingSetup) -> int:
    """Peak bytes in tensors during a step with existing optimizer states."""
    model = trained_model(config, setup)
    inputs = draw_inputs(config, setup, Random(0))
    set_patches(model, inputs["input_ids"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = create_optimizer(setup.optimizer, trained, lr=1e-4)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def step() -> None:
        loss = model(**inputs, use_cache=False, fast_lm_head=True).loss
        loss.backward()
        del loss
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    gc.collect()
    return int(_own_peak(step, model, optimizer))


def measure(config: PreTrainedConfig, name: str) -> Row:
    """Measure one architecture with the training setup `SETUPS[name]`."""
    model_type, text = config.model_type, config.get_text_config(decoder=True)
    config = text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else config
    how = "traced"
    setup = TrainingSetup(**SETUPS[name], packing=False, micro_batch_size=2, sequence_length=256)
    torch.manual_seed(0)
    try:
        tiny = shrink_model_config(
            config, vocab_size=512, min_layers=LAYERS, bos_token_id=1, eos_token_id=2, pad_token_id=0
        )
        tiny.use_cache = False
        # The CPU has no fused attention with dropout.
        tiny.get_text_config(decoder=True).update(dict.fromkeys(dropouts_of(tiny.get_text_config(decoder=True)), 0.0))
        if not skeleton_of(tiny).supports_gradient_checkpointing:
            if name == "recomputed":
                return Row(model_type, name, how, problem="the class has no checkpointing")
            setup = replace(setup, checkpointing="none")
    except Exception as error:
        return Row(model_type, name, how, problem=f"no small configuration: {_short(error)}")
    try:
        facts = facts_of_any(tiny.to_dict(), name=model_type)
        how = "traced" if facts.traced_config else "modelled"
        if not facts.traced_config and not has_kernel(facts, "sdpa"):
            setup = replace(setup, attention="eager")
            tiny._attn_implementation = "eager"
        prediction = predict_memory(facts, setup, is_cuda=False, is_tracked=True)
    except Exception as error:
        return Row(model_type, name, how, problem=f"no plan: {_short(error)}")
    try:
        measured = measured_peak(tiny, setup)
    except Exception as error:
        return Row(model_type, name, how, problem=f"no step: {_short(error)}")
    states = prediction.states.weight_bytes + prediction.states.optimizer_bytes
    return Row(model_type, name, how, measured, round(prediction.peak_bytes), 1 - states / measured)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def summary(rows: list[Row]) -> list[str]:
    """Lines of a Markdown table with errors by kind of plan."""
    lines = ["| plan | training | models | median error | 90% within | worst error |", "|---|---|---|---|---|---|"]
    groups = [(how, setup) for how in ("modelled", "traced") for setup in SETUPS] + [("all", "all")]
    for how, setup in groups:
        chosen = [r for r in rows if r.measured_bytes and how in (r.how, "all") and setup in (r.setup, "all")]
        if chosen:
            errors = sorted(abs(row.error) for row in chosen)
            worst = max(chosen, key=lambda row: abs(row.error))
            lines.append(
                f"| {how} | {setup} | {len(chosen)} | {statistics.median(errors):.2%} | "
                f"{errors[int(0.9 * (len(errors) - 1))]:.2%} | {worst.error:+.2%} ({worst.model_type}) |"
            )
    return lines


def write(rows: list[Row]) -> None:
    """Write both files."""
    rows = sorted(rows, key=lambda row: (row.model_type, row.setup))
    document = {"versions": versions(), "rows": [asdict(row) | {"error": row.error} for row in rows]}
    RESULTS.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    lines = [
        "# Plans of every causal language model beside measured steps on a CPU",
        "",
        "`python benchmarks/traced_models.py`: peak bytes in tensors over a whole optimizer step of a shrunken model,",
        f"2 × 256 tokens, fp32, {LAYERS} layers or more: full training, without checkpointing and with selective",
        "(`recomputed`); LoRA with full checkpointing; where the class supports it. Layers are modelled or traced.",
        "Nothing was fitted to these models.",
        "",
        *summary(rows),
        "",
        "| model type | plan | training | measured, MiB | predicted, MiB | error |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r.model_type} | {r.how} | {r.setup} | {r.measured_bytes / 2**20:.1f} | "
            f"{r.predicted_bytes / 2**20:.1f} | {r.error:+.2%} |"
            for r in rows
            if r.measured_bytes
        ),
        "",
        "Without a figure:",
        "",
        *(f"- {r.model_type}, {r.setup}: {r.problem}" for r in rows if r.problem),
    ]
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def known_rows() -> list[Row]:
    """Existing rows for these versions."""
    path = RESULTS.with_suffix(".json")
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if document.get("versions") != versions():
        return []
    return [Row(**{key: value for key, value in row.items() if key != "error"}) for row in document["rows"]]


def record(row: Row) -> None:
    """Add a row to both files; scans may run in parallel."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write(
            [*(known for known in known_rows() if (known.model_type, known.setup) != (row.model_type, row.setup)), row]
        )


def main() -> None:
    """Measure the requested architectures without known results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, help="model types")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th architecture from the i-th on")
    parser.add_argument("--setups", nargs="*", default=list(SETUPS), choices=list(SETUPS), help="ways to train")
    parser.add_argument("--again", action="store_true", help="also what has been run")
    parser.add_argument("--at_most", type=int, default=None, help="architectures to run now; the next call goes on")
    parser.add_argument("--print", action="store_true", help="write nothing")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    rows = {(row.model_type, row.setup): row for row in known_rows()}
    started, num_run = time.monotonic(), 0
    first, step = (int(number) for number in options.part.split("/"))
    with tempfile.TemporaryDirectory() as cache:
        environ["XDG_CACHE_HOME"] = cache
        for name in options.setups:
            for model_type, config in list(all_architectures())[first::step]:
                if options.only is not None and model_type not in options.only:
                    continue
                known = rows.get((model_type, name))
                asked_for = options.again or options.print or (options.only is not None and known and known.problem)
                if known is not None and not asked_for:
                    continue
                if options.at_most is not None and num_run >= options.at_most:
                    continue
                num_run += 1
                row = measure(config, name)
                gc.collect()
                print(f"{row.model_type} {row.setup} {row.how} {row.error:+.2%} {row.problem}", flush=True)
                rows[(model_type, name)] = row
                if not options.print:
                    record(row)
    print("\n".join(summary(list(rows.values()))))
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
