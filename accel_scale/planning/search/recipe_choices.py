"""What the planner knows about a recipe, and what a recipe needs besides a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from accel_scale.facts.vllm import why_no_weights
from accel_scale.planning.models.training_setup import TrainingSetup

# Flags that a plan sets both in sft.py and in pretrain.py.
_COMMON_FLAGS = (
    "attn_implementation", "checkpointing_policy", "global_batch_size", "learning_rate", "logging_steps", "long_rows",
    "lora_alpha", "lora_dropout", "lora_r", "lora_target_modules", "lr_scheduler_type", "max_length", "max_steps",
    "method", "model_name_or_path", "optim", "output_dir", "per_device_train_batch_size", "precision", "seed",
    "sp_size", "sync_each_batch", "warmup_ratio",
)  # fmt: skip


@dataclass(frozen=True)
class PlannedRecipe:
    """What the planner must know about the recipe that will run a plan.

    Attributes:
        script: Its path in the written commands.
        methods: The training methods it offers, out of ``full``, ``lora`` and ``qlora``.
        shared_by: What ranks can share: only ``sp`` (rows, if the engine has the whole model), or ``tp``, ``pp``
            and ``sp``, if the recipe divides the model itself.
        always_packs: Whether every row is filled with documents although there is no ``packing`` flag.
        has_reference_model: Whether full fine-tuning keeps a frozen copy of the model, as DPO does. With adapters,
            the base without them is the reference.
        rows_per_example: Rows per example, two for DPO's pairs. Batch sizes count examples.
        loss: One of `training_setup.LOSSES`.
        estimates_kl: Whether the model and its reference score the rows of a micro-batch a second time with each
            other's answers, as in KTO.
        disables_dropout: Whether dropout is off by default, the adapters' too, as in TRL for preferences.
        generates: Whether the model writes the answers that it is trained on. Batch sizes then count answers.
        num_generations: Answers to each prompt if the recipe generates and no number is given.
        beta: Weight of the KL term in the same case.
        has_images: Whether rows have images, which the planner does not count.
        rewards: Whether it trains a reward model, with a head of one score per row instead of the vocabulary's.
        config_class: Name of its training configuration in `settings.trl_config`.
        data_flag: Flag that names the data, with a list as value if `data_is_list`.
        example_data: Data to write if none is named.
        example_lines: What the example data needs besides its name, as lines of YAML.
        learning_rates: Usual learning rates by method, which are written; empty: the recipe's default.
        flags: Names of its flags. The commands fill them in from the recipe's parser.
    """

    script: str = "the recipe"
    methods: tuple[str, ...] = ("full",)
    shared_by: tuple[str, ...] = ()
    always_packs: bool = False
    has_reference_model: bool = False
    rows_per_example: int = 1
    loss: str = "chunked"
    estimates_kl: bool = False
    generates: bool = False
    num_generations: int = 8
    beta: float = 0.0
    disables_dropout: bool = False
    has_images: bool = False
    rewards: bool = False
    config_class: str = "RecipeSFTConfig"
    data_flag: str = "dataset_name"
    data_is_list: bool = False
    example_data: str | None = None
    example_lines: tuple[str, ...] = ()
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()

    @property
    def divides_model(self) -> bool:
        """True if ranks can share the model itself."""
        return "pp" in self.shared_by

    def packs(self, wanted: bool) -> bool:
        """True if rows are packed, given whether packing is `wanted`."""
        return wanted and (self.always_packs or "packing" in self.flags)

    def why_not(self, setup: TrainingSetup) -> str | None:
        """Why the recipe cannot run `setup`, mostly a flag that it lacks; None if it can."""
        policy, flags = setup.checkpointing, self.flags
        if setup.micro_batch_size < setup.least_rows:
            return f"a micro-batch has at least {setup.least_rows} rows, for the KL term"
        switches = {"none": flags, "full": flags & {"checkpointing_policy", "gradient_checkpointing"}}
        if not switches.get(policy, flags & {"checkpointing_policy"}):
            return f"{self.script} has no --checkpointing_policy for {policy} checkpointing"
        if setup.optimizer != "adamw_torch_fused" and "optim" not in flags:
            return f"{self.script} has no --optim for {setup.optimizer}"
        if setup.sync_each_batch and "sync_each_batch" not in flags:
            return f"{self.script} has no --sync_each_batch"
        if setup.long_rows and "long_rows" not in flags:
            return f"{self.script} has no --long_rows"
        if setup.precision in ("bf16_true", "fp8") and "precision" not in flags:
            return f"{self.script} has no --precision for {setup.precision}"
        if setup.vllm is not None and (reason := _why_no_vllm(setup)):
            return reason
        if setup.accumulation > 1 and not flags & {"global_batch_size", "gradient_accumulation_steps"}:
            return f"{self.script} has no --gradient_accumulation_steps"
        return None


def _why_no_vllm(setup: TrainingSetup) -> str | None:
    reason = why_no_weights(
        is_quantised=setup.quantises_base,
        trains_adapters=setup.trains_adapters,
        is_fsdp=setup.parallel.kind.is_fsdp,
    )
    return reason and reason[0].removesuffix(".")


SFT_PLAN = PlannedRecipe(
    "recipes/sft.py",
    ("full", "lora", "qlora"),
    ("sp",),
    # Runs unchanged with any chat or base model; users replace it.
    example_data="yahma/alpaca-cleaned",
    # The usual starting points: Llama 2's and Tulu's fine-tuning, and QLoRA's paper (Dettmers et al. 2023, table 9).
    learning_rates={"full": 2e-5, "lora": 2e-4, "qlora": 2e-4},
    flags=frozenset(
        (*_COMMON_FLAGS, "bnb_4bit_quant_type", "columns", "dataset_name", "num_train_epochs", "packing",
         "save_strategy", "use_bnb_nested_quant", "use_dora")
    ),
)  # fmt: skip
DPO_PLAN = PlannedRecipe(
    "recipes/dpo.py",
    ("full", "lora", "qlora"),
    has_reference_model=True,
    rows_per_example=2,
    loss="log_probs",
    disables_dropout=True,
    config_class="RecipeDPOConfig",
    example_data="trl-lib/ultrafeedback_binarized",
    # Zephyr's (Tunstall et al. 2023), and ten times that for adapters, as usual.
    learning_rates={"full": 5e-7, "lora": 5e-6, "qlora": 5e-6},
    flags=SFT_PLAN.flags - {"packing", "sp_size", "long_rows"} | {"precompute_ref_log_probs"},
)
KTO_PLAN = replace(
    DPO_PLAN,
    script="recipes/kto.py",
    rows_per_example=1,
    estimates_kl=True,
    config_class="RecipeKTOConfig",
    example_data="trl-lib/kto-mix-14k",
)
GRPO_PLAN = PlannedRecipe(
    "recipes/grpo.py",
    ("full", "lora", "qlora"),
    loss="log_probs",
    generates=True,
    config_class="RecipeGRPOConfig",
    example_data="openai/gsm8k",
    example_lines=("dataset_config: main", 'columns: ["prompt=question", "completion=answer"]', 'rewards: ["number"]'),
    learning_rates={"full": 1e-6, "lora": 1e-5, "qlora": 1e-5},
    flags=SFT_PLAN.flags - {"packing", "sp_size", "long_rows", "max_length"}
    | {"beta", "dataset_config", "max_completion_length", "num_generations", "rewards"},
)
RLOO_PLAN = replace(GRPO_PLAN, script="recipes/rloo.py", config_class="RecipeRLOOConfig", num_generations=2, beta=0.05)
REWARD_PLAN = PlannedRecipe(
    "recipes/reward.py",
    ("full", "lora", "qlora"),
    rows_per_example=2,
    rewards=True,
    disables_dropout=True,
    config_class="RecipeRewardConfig",
    example_data="trl-lib/ultrafeedback_binarized",
    # Llama 2's (Touvron et al. 2023, section 3.2.2) for 7B to 13B, and ten times that for adapters, as usual.
    learning_rates={"full": 1e-5, "lora": 1e-4, "qlora": 1e-4},
    flags=DPO_PLAN.flags,
)
VISION_PLAN = PlannedRecipe(
    "recipes/vision.py",
    ("full", "lora", "qlora"),
    has_images=True,
    config_class="RecipeVisionConfig",
    flags=SFT_PLAN.flags - {"packing", "sp_size", "long_rows"},
)
PRETRAIN_PLAN = PlannedRecipe(
    "recipes/pretrain.py",
    ("full", "lora"),
    ("tp", "pp", "sp"),
    always_packs=True,
    data_flag="data",
    data_is_list=True,
    example_data="roneneldan/TinyStories",
    # Usual rates for continuing to train a model.
    learning_rates={"full": 3e-5, "lora": 2e-4},
    flags=frozenset((*_COMMON_FLAGS, "data", "max_tokens", "pp_schedule", "pp_size", "tp_size")),
)


# Keyed by the values of ``--recipe``.
PLANNED_RECIPES = {
    "sft": SFT_PLAN,
    "dpo": DPO_PLAN,
    "kto": KTO_PLAN,
    "grpo": GRPO_PLAN,
    "rloo": RLOO_PLAN,
    "reward": REWARD_PLAN,
    "vision": VISION_PLAN,
    "pretrain": PRETRAIN_PLAN,
}


@dataclass(frozen=True)
class RecipeChoices:
    """What a recipe needs besides the plan.

    Attributes:
        model: A folder or a hub name.
        dataset: Data to train on; None: an example that runs.
        columns: ``role=column`` items of ``--columns``.
        tokens: Tokens to train on, without padding; None: one epoch.
        max_length: Length at which rows are cut, if not the planned length.
        settings: Flags of the recipe that are not part of the plan's setting, with their values.
    """

    model: str
    dataset: str | None = None
    columns: tuple[str, ...] = ()
    tokens: float | None = None
    max_length: int | None = None
    settings: tuple[tuple[str, str], ...] = ()
