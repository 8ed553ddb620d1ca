"""A user's unchecked request for a plan: every flag of `accel-scale plan`, declared only here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from accel_scale.facts.hardware import NETWORK_GBIT_PER_SECOND, catalogue
from accel_scale.facts.names import METHODS, PIPELINE_SCHEDULES, PRECISIONS
from accel_scale.facts.optimizer_specs import LEAN_OPTIMIZERS
from accel_scale.facts.stacks import STACKS
from accel_scale.planning.models.catalogue import full_names
from accel_scale.planning.search.recipe_choices import PLANNED_RECIPES, PlannedRecipe

Value = str | int | bool | None
# Groups of `accel-scale plan --help`.
MACHINE, TRAINING, ANSWER = "machine", "training, as the recipe's flags", "answer"
SHARING = "ranks that share the model, as recipes/pretrain.py's flags"
PREFERENCES = "preferences and rewards, as the flags of their recipes"
_MOST_ROWS, _MOST_CARDS, _MOST_TOKENS = 2**20, 2**16, 2**24


@dataclass(frozen=True)
class PlanFlag:
    """One flag of `accel-scale plan`, and its control on the page of `accel-scale board`.

    Attributes:
        name: Name without dashes.
        default: Default value; None leaves the setting open.
        help: Text in ``--help``, with ``%(default)s`` for the default.
        group: Group in ``--help``.
        metavar: Name of the value in ``--help``.
        off: Help of ``--no_NAME``, for flags that are on by default.
        is_switch: Whether the value is true, false or left open.
        label: Label above the control on the page; empty: it is not on the page.
        info: Text below the label.
        start: Initial value on the page, if not the default.
        choices: Values to pick from on the page.
        takes_others: Whether other values may be typed on the page.
        most: The largest number allowed on the page; 0 for text.
        is_basic: Whether the control is visible before "More settings" is opened.
    """

    name: str
    default: Any
    help: str
    group: str = TRAINING
    metavar: str | None = None
    off: str = ""
    is_switch: bool = False
    label: str = ""
    info: str = ""
    start: Value = None
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()
    takes_others: bool = False
    most: int = 0
    is_basic: bool = False


def _flag(default: object, text: str, group: str = TRAINING, **more: object) -> Any:
    return field(default=default, metadata={"help": text, "group": group, **more})


@dataclass(frozen=True)
class Wish:
    """What the user typed, flag by flag; None leaves a setting open."""

    model: str
    gpu: str | None = _flag(
        None, 'a card, e.g. "RTX 4090", H100, 24GiB (default: those of this machine)', MACHINE,
        label="Card", info="or its memory, like 24GiB", start="RTX 4090", is_basic=True,
        choices=lambda: tuple(gpu.name for gpu in catalogue()), takes_others=True,
    )  # fmt: skip
    num_gpus: str | None = _flag(
        None, "all GPUs together (default: 1, or those of this machine)", MACHINE, metavar="N",
        label="GPUs", info="all together", start=1, most=_MOST_CARDS, is_basic=True,
    )  # fmt: skip
    gpus_per_node: str | None = _flag(
        None, "GPUs that share fast links (default: 8)", MACHINE, metavar="N",
        label="GPUs per server", info="open: 8", most=_MOST_CARDS,
    )  # fmt: skip
    network: str | None = _flag(
        None, "between nodes, e.g. infiniband-ndr, ethernet-100g, 25GB (per second)", MACHINE,
        label="Network between servers", info="or bytes per second, like 25GB",
        choices=tuple(NETWORK_GBIT_PER_SECOND), takes_others=True,
    )  # fmt: skip
    host_memory: str | None = _flag(
        None, "host memory of one node, e.g. 512GiB; not checked if not given", MACHINE,
        label="Host memory of a server", info="like 512GiB; open: not checked",
    )  # fmt: skip
    host_bandwidth: str | None = _flag(
        None, "bandwidth of host memory per second, e.g. 200GB", MACHINE, metavar="SPEED"
    )
    nvme: str | None = _flag(
        None, "speed of a node's NVMe drives per second, e.g. 6GB", MACHINE, metavar="SPEED",
        label="Speed of NVMe drives", info="per second, like 6GB",
    )  # fmt: skip
    links: str | None = _flag(
        None, "links measured by accel-scale comm; `measured`: the last file written here", MACHINE, metavar="FILE"
    )
    method: str = _flag(
        "full", f"{', '.join(METHODS)}, or auto: any of them (default: %(default)s)",
        label="Method", info="auto: any of them", start="auto", choices=(*METHODS, "auto"), is_basic=True,
    )  # fmt: skip
    precision: str | None = _flag(
        None, f"{', '.join(PRECISIONS)} (default: bf16 if supported)",
        label="Precision", info="open: bf16 if supported", choices=PRECISIONS,
    )  # fmt: skip
    optim: str | None = _flag(
        None, "optimizer (default: fused AdamW, or 8-bit states if they help)",
        label="Optimizer", info="open: fused AdamW, or 8-bit states", choices=LEAN_OPTIMIZERS, takes_others=True,
    )  # fmt: skip
    checkpointing_policy: str | None = _flag(
        None, "activation checkpointing (default: the fastest of none, selective and full)",
        label="Activation checkpointing", info="open: the fastest that fits",
        choices=("none", "selective", "full", "offload"), takes_others=True,
    )  # fmt: skip
    attn_implementation: str | None = _flag(None, "eager, sdpa, flash_attention_2 … (default: sdpa)")
    max_length: str | None = _flag(
        None, "tokens per row (default: 2048)", metavar="TOKENS",
        label="Row length", info="tokens", start=2048, most=_MOST_TOKENS, is_basic=True,
    )  # fmt: skip
    mean_length: str | None = _flag(None, "mean tokens of a row without padding", metavar="TOKENS")
    per_device_train_batch_size: str | None = _flag(
        None, "micro-batch (default: the fastest that fits)", metavar="N",
        label="Micro-batch", info="open: the fastest that fits", most=_MOST_ROWS,
    )  # fmt: skip
    global_batch_size: str = _flag(
        "64", "sequences per optimizer step (default: %(default)s)", metavar="N",
        label="Batch per step", info="sequences, all GPUs", most=_MOST_ROWS, is_basic=True,
    )  # fmt: skip
    sync_each_batch: str | None = _flag(
        None,
        "FSDP2 reduces gradients after every micro-batch: true or false (default: whichever is faster)",
        is_switch=True,
    )
    long_rows: str | None = _flag(
        None, "MLPs and norms in tiles, layer inputs in host memory: true or false (default: false)", is_switch=True
    )
    packing: bool = _flag(
        True, "true or false (default: true)", off="rows hold one document each and are padded",
        label="Padded, not packed",
    )  # fmt: skip
    lora_r: str = _flag(
        "16", "rank of the adapters (default: %(default)s)", metavar="RANK",
        label="LoRA rank", most=2**16,
    )  # fmt: skip
    lora_target_modules: tuple[str, ...] = _flag(("all-linear",), "layers with adapters", metavar="NAME")
    lora_dropout: str = _flag("0.05", "dropout of the adapters (default: %(default)s)", metavar="P")
    use_dora: bool = _flag(False, "adapters with a magnitude vector")
    stack: str = _flag("ours", f"plan what this stack would need: {', '.join(STACKS)} (default: %(default)s)")
    recipe: str | PlannedRecipe = _flag(
        "sft",
        f"recipe that will run it: {', '.join(PLANNED_RECIPES)} (the last for tensor and pipeline parallelism), "
        "or a script that declares a RECIPE (default: %(default)s)", SHARING,
        label="Recipe", choices=tuple(PLANNED_RECIPES),
    )  # fmt: skip
    tp_size: str | None = _flag(
        None, "tensor parallelism (default: tried if nothing simpler fits)", SHARING, metavar="N"
    )
    pp_size: str | None = _flag(None, "pipeline stages (default: as --tp_size)", SHARING, metavar="N")
    sp_size: str | None = _flag(None, "Ulysses sequence parallelism (default: as --tp_size)", SHARING, metavar="N")
    pp_schedule: str | None = _flag(
        None, f"{', '.join(PIPELINE_SCHEDULES)} (default: {PIPELINE_SCHEDULES[0]})", SHARING
    )
    precompute_ref_log_probs: bool = _flag(False, "dpo, kto: what the reference says is computed before", PREFERENCES)
    num_generations: str | None = _flag(
        None, "answers to each prompt (default: 8 of grpo, 2 of rloo)", PREFERENCES, metavar="N"
    )
    max_prompt_length: str | None = _flag(
        None, "grpo, rloo: tokens of the longest prompt (default: 512)", PREFERENCES, metavar="TOKENS"
    )
    max_completion_length: str | None = _flag(
        None, "grpo, rloo: tokens of an answer, at most (default: 512)", PREFERENCES, metavar="TOKENS"
    )
    beta: str | None = _flag(
        None, "above 0 a reference is kept (default: 0 of grpo, 0.05 of rloo)", PREFERENCES, metavar="WEIGHT"
    )
    vllm_gpu_memory_utilization: str | None = _flag(
        None, "grpo, rloo: vLLM writes the answers in this share of each card", PREFERENCES, metavar="SHARE"
    )
    strategy: tuple[str, ...] = _flag((), 'only this strategy, e.g. "ZeRO-2"; repeatable', ANSWER)


MODEL = PlanFlag(
    "model", None, "the model to train", label="Model", info="of the catalogue, or owner/name on the hub",
    start="meta-llama/Llama-3.1-8B", choices=full_names, takes_others=True, is_basic=True,
)  # fmt: skip
# Flags for the cost of a job; not part of a `Wish`.
BUDGET = (
    PlanFlag(
        "tokens", None, "token budget, e.g. 1B: adds hours, energy and price", ANSWER, "D",
        label="Token budget", info="like 1B: adds hours",
    ),
    PlanFlag(
        "price_per_gpu_hour", None, "in any currency", ANSWER, "PRICE",
        label="Price of a GPU and hour", info="any currency; needs a token budget",
    ),
)  # fmt: skip
FLAGS = (*(PlanFlag(f.name, f.default, **f.metadata) for f in fields(Wish)[1:]), *BUDGET)
# Settings that are true or false, and open if not given.
SWITCHES = tuple(flag.name for flag in FLAGS if flag.is_switch)
# Settings with several values.
LISTS = tuple(flag.name for flag in FLAGS if isinstance(flag.default, tuple))
