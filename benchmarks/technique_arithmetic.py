"""`techniques.py`: figures from formulas, each computed by the function that planning or training uses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from technique_rows import Stage, Values, Work

from accel_scale.facts.optimizer_specs import state_bytes_per_parameter
from accel_scale.flags.pretraining import PretrainArguments
from accel_scale.network.collectives import OPS, algorithms_of, steps
from accel_scale.optimization.batch import derive_accumulation
from accel_scale.optimization.schedules import lr_factor, scaled_learning_rate, warmup_step_count
from accel_scale.planning.cost.flops import hardware_flops_per_token
from accel_scale.planning.cost.pipeline import bubble_fraction
from accel_scale.planning.cost.sharding import frozen_weight_bytes
from accel_scale.planning.laws.reference_tables import FP32_ADAM, GB, ReferenceTable, reference_tables
from accel_scale.planning.laws.scaling_laws import plan_scaling
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.parameters import lora_params, parameter_groups
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = "meta-llama/Llama-3.1-8B"
STEPS, WARM_UP = 1000, 0.03
ROWS, LENGTH = 4, 2048
OPTIMIZERS = {
    "sgd": "sgd",
    "momentum": "sgd_momentum",
    "adagrad": "adagrad",
    "rmsprop": "rmsprop",
    "adam": "adamw_torch",
    "adam_8bit": "adamw_8bit",
    "adam_4bit": "adamw_torch_4bit",
    "paged": "paged_adamw_8bit",
}


def memory() -> dict[str, Values]:
    """Bytes per parameter and examples based on them."""
    tables = reference_tables()
    per_parameter = {str(row[0]): float(row[-1]) for row in tables["bytes_per_parameter"]}
    one, seven = _by_name(tables["memory_1b"]), _by_name(tables["memory_7b"])
    zero = [float(row[1]) for row in tables["zero"]]
    return {
        "bytes/per_parameter": {"fp32": per_parameter["fp32 Adam"], "mixed": per_parameter["mixed 16-bit Adam"]},
        "bytes/1b": {"states": one["states"][0], "total": one["total"][0]},
        "bytes/7b": {
            "fp32": seven["states"][0],
            "mixed": seven["states"][1],
            "fp32_total": seven["total"][0],
            "mixed_total": seven["total"][1],
        },
        "bytes/weights": {"70b": 70e9 * FP32_ADAM["weights"] / GB, "175b": 175e9 * FP32_ADAM["weights"] / GB},
        "bytes/zero": dict(zip(("ddp", "zero1", "zero2", "zero3"), zero, strict=True)),
        "bytes/optimizers": {name: state_bytes_per_parameter(optim) or 0.0 for name, optim in OPTIMIZERS.items()},
    }


def formats() -> dict[str, Values]:
    """Exponent and mantissa bits, largest values and scaling of each format."""
    rows = reference_tables()["precisions"]
    keys = ("exponent", "mantissa", "largest", "scaling")
    return {f"format/{str(row[0]).replace(' ', '_')}": dict(zip(keys, row[1:], strict=True)) for row in rows}


def adapters() -> dict[str, Values]:
    """Share of trained parameters, and bytes of a frozen 4-bit weight."""
    facts = load_model_facts(MODEL, allow_download=False)
    share = {f"r{rank}": lora_params(facts, LoraSetup(rank=rank)) / facts.num_params for rank in (1, 16, 64)}
    qlora = TrainingSetup(method="qlora")
    groups = parameter_groups(facts, qlora)
    per_weight = {}
    for name, doubled in (("single", False), ("double", True)):
        whole = frozen_weight_bytes(replace(qlora, double_quantisation=doubled), groups)
        per_weight[name] = (whole - (groups.frozen - groups.quantised) * qlora.frozen_bytes) / groups.quantised
    return {"lora/share": share, "qlora/bytes_per_weight": per_weight}


def batches() -> dict[str, Values]:
    """Accumulation for a batch, learning rate for a larger one, and points of the schedules."""
    warm = warmup_step_count(STEPS, warmup_ratio=WARM_UP)
    last = STEPS - 1
    cosine = [
        lr_factor(step, name="cosine", num_training_steps=STEPS, num_warmup_steps=warm, min_lr_ratio=0.1)
        for step in range(STEPS)
    ]
    wsd = [
        lr_factor(
            step, name="warmup_stable_decay", num_training_steps=STEPS, num_warmup_steps=warm, num_decay_steps=100
        )
        for step in range(STEPS)
    ]
    return {
        "batch/effective": {
            "one_gpu": derive_accumulation(32, 8, 1),
            "four_gpus": derive_accumulation(32, 8, 4),
            "of_256": derive_accumulation(256, 64, 1),
        },
        "batch/linear": {
            "factor": scaled_learning_rate(1.0, global_batch_size=256, base_batch_size=32, rule="linear")
        },
        "schedule/cosine": {"warmup": warm, "first": cosine[0], "peak": cosine[warm], "end": cosine[last]},
        "schedule/wsd": {"constant": sum(f == 1.0 for f in wsd) / STEPS, "end": wsd[last]},
    }


def communication() -> dict[str, Values]:
    """Volumes of collectives, speeds of links, and pipeline bubbles."""
    links = {str(row[0]): row[1:] for row in reference_tables()["links"]}
    at_8 = {name: steps("all_reduce", name, 1.0, 8).num_bytes for name in ("central", "ring")}
    at_64 = {name: steps("all_reduce", name, 1.0, 64).num_bytes for name in ("central", "ring")}
    bubbles = {
        "of_4_4": bubble_fraction("1f1b", 4, 4),
        "of_4_16": bubble_fraction("1f1b", 4, 16),
        "of_4_32": bubble_fraction("1f1b", 4, 32),
        "interleaved_4_16": bubble_fraction("interleaved", 4, 16, 2),
    }
    facts = load_model_facts(MODEL, allow_download=False)
    # nn.DataParallel: the first card sends the weights to the others and takes their gradients and outputs.
    first_card = steps("all_reduce", "central", 1.0, 4).num_bytes / steps("all_reduce", "ring", 1.0, 4).num_bytes
    logits = 4 * ROWS * LENGTH * facts.vocab_size * 2
    return {
        "data_parallel/first_card": {"moves": first_card, "logits": logits, "own_logits": logits / 4},
        "collectives/known": {"count": len(OPS), "names": ", ".join(op for op in OPS if algorithms_of(op))},
        "collectives/all_reduce": {
            "central_8": at_8["central"],
            "ring_8": at_8["ring"],
            "central_64": at_64["central"],
            "ring_64": at_64["ring"],
        },
        "links/pcie": {
            "pcie4_way": links["PCIe 4.0 x16"][0],
            "pcie4": links["PCIe 4.0 x16"][1],
            "pcie5_way": links["PCIe 5.0 x16"][0],
            "pcie5": links["PCIe 5.0 x16"][1],
        },
        "links/nvlink": {"a100": links["NVLink A100"][1], "h100": links["NVLink H100"][1]},
        "pipeline/bubble": bubbles,
        "parallel/3d": {"gpus": 4 * 4 * 4},
    }


def laws() -> dict[str, Values]:
    """Compute-optimal training, searches and recomputation."""
    facts = load_model_facts(MODEL, allow_download=False)
    flops = {
        name: hardware_flops_per_token(facts, TrainingSetup(checkpointing=name)).total
        for name in ("none", "full", "every_2", "every_3", "selective")
    }
    seven, seventy = plan_scaling("rule", params=7e9), plan_scaling("rule", params=70e9)
    return {
        "laws/tokens": {"of_7b": seven.tokens / 1e9, "of_70b": seventy.tokens / 1e12, "compute_7b": seven.compute},
        "laws/params": {"of_compute": plan_scaling("rule", compute=seven.compute).params / 1e9},
        "search/random": {"chance": 1 - 0.95**60},
        "search/grid": {"three": 3**3, "five": 3**5},
        "attention/scores": {"millions": 4096**2 / 1e6, "heads": 32 * 4096**2 / 1e9},
        "checkpointing/flops": {name: value / flops["none"] - 1 for name, value in flops.items() if name != "none"},
    }


def defaults() -> dict[str, Values]:
    """The recipes' defaults."""
    from accelerate.utils import DistributedDataParallelKwargs

    library = json.loads((REPOSITORY / "accel_scale" / "assets" / "library_flags.json").read_text(encoding="utf-8"))
    of_library = {flag["dest"]: flag["default"] for flag in _flags_in(library)}
    sources = [path for room in ("accel_scale", "recipes") for path in (REPOSITORY / room).rglob("*.py")]
    uses = sum(
        len(re.findall(r"(?<!Distributed)\bDataParallel\(", path.read_text(encoding="utf-8"))) for path in sources
    )
    return {
        "defaults/clipping": {"sft": of_library["max_grad_norm"], "pretrain": PretrainArguments.max_grad_norm},
        "defaults/bucket": {"mb": DistributedDataParallelKwargs().bucket_cap_mb},
        "defaults/data_parallel": {"uses": uses},
    }


def _flags_in(tree: Any) -> Iterator[dict[str, Any]]:
    """Every entry with a destination in the table of library flags."""
    if isinstance(tree, dict):
        if "dest" in tree:
            yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from _flags_in(part)


def _by_name(table: ReferenceTable) -> dict[str, tuple[float | str, ...]]:
    return {str(row[0]): row[1:] for row in table}


STAGE = Stage(
    "arithmetic",
    "arithmetic",
    "From formulas of this package.",
    (
        Work(
            (
                "bytes/per_parameter", "bytes/1b", "bytes/7b", "bytes/weights", "bytes/zero", "bytes/optimizers",
            ),
            memory,
        ),
        Work(tuple(f"format/{n}" for n in ("fp32", "fp16", "bf16", "fp8_E4M3", "fp8_E5M2")), formats),
        Work(("lora/share", "qlora/bytes_per_weight"), adapters),
        Work(("batch/effective", "batch/linear", "schedule/cosine", "schedule/wsd"), batches),
        Work(
            (
                "collectives/known", "collectives/all_reduce", "links/pcie", "links/nvlink", "pipeline/bubble",
                "parallel/3d", "data_parallel/first_card",
            ),
            communication,
        ),
        Work(
            (
                "laws/tokens", "laws/params", "search/random", "search/grid", "attention/scores",
                "checkpointing/flops",
            ),
            laws,
        ),
        Work(("defaults/clipping", "defaults/bucket", "defaults/data_parallel"), defaults),
    ),
)  # fmt: skip
