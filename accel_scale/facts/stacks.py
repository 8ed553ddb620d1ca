"""Memory-related defaults of other training stacks, each read from its source: dtypes, loss, policy, optimizer.

Only defaults: what a user sets in that stack is set in the plan with the same flags. A stack with its own models or
its own kernels is planned with transformers' layers; `assumptions` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stack:
    """One stack's defaults.

    Attributes:
        source: Project, version or commit, and the files that set the defaults.
        loss: One of the planner's losses.
        checkpointing: Name of a policy; None if the planner chooses.
        optimizer: A value of ``--optim``; None if the planner chooses.
        precision: A value of ``--precision``, if it is not mixed.
        trained: Dtype of trained weights by method, where it differs from the precision's.
        frozen: Dtype of unquantised frozen weights by method, where it differs from the compute dtype.
        quantises_whole: Whether every card holds the whole 4-bit base before it is sharded.
        expandable_segments: Whether it sets ``PYTORCH_ALLOC_CONF=expandable_segments:True``.
        assumptions: What is not modelled, one sentence each.
    """

    source: str
    loss: str = "chunked"
    checkpointing: str | None = None
    optimizer: str | None = None
    precision: str | None = None
    trained: Mapping[str, str] = field(default_factory=dict)
    frozen: Mapping[str, str] = field(default_factory=dict)
    quantises_whole: bool = True
    expandable_segments: bool = False
    assumptions: tuple[str, ...] = ()


OURS = "ours"
STACKS: Mapping[str, Stack] = {
    OURS: Stack("accel-scale: accel_scale/settings, accel_scale/optimization/loss.py"),
    # The model is loaded in fp32 by default, with or without adapters; adapters of a 4-bit base are cast to bf16.
    # The head's log-probabilities are computed in tiles.
    "trl": Stack(
        "TRL 1.16.0: trl/trainer/model_config.py (dtype), base_config.py (gradient_checkpointing, bf16), "
        "sft_trainer.py (fused_lm_head, adapters of 4-bit bases), utils.py (add_fused_lm_head)",
        loss="log_probs",
        checkpointing="full",
        optimizer="adamw_torch_fused",
        trained={"qlora": "bfloat16"},
        frozen={"lora": "float32", "qlora": "float32"},
    ),
    # Models are loaded in bf16 and trained in it under autocast. PEFT's preparation of a 4-bit base casts norms and
    # embeddings to fp32, and axolotl casts them back if there are adapters.
    "axolotl": Stack(
        "axolotl 002a637c: src/axolotl/loaders/model.py (_configure_embedding_dtypes), "
        "src/axolotl/utils/schemas/training.py (optimizer), "
        "src/axolotl/utils/__init__.py (set_pytorch_cuda_alloc_conf)",
        loss="full",
        checkpointing="none",
        optimizer="adamw_torch_fused",
        trained={"full": "bfloat16"},
        expandable_segments=True,
        assumptions=("axolotl's optional kernels (Liger, cut cross-entropy, LoRA kernels) are off by default.",),
    ),
    # Trained parameters are cast to fp32, the frozen base stays in the compute dtype; logits are not chunked.
    "llamafactory": Stack(
        "LLaMA-Factory 06d78ff1, 01d87b82: src/llamafactory/model/adapter.py (cast_trainable_params_to_fp32), "
        "model/model_utils/checkpointing.py (prepare_model_for_training)",
        loss="full",
        checkpointing="full",
        optimizer="adamw_torch_fused",
    ),
    # Layer inputs are offloaded to host memory, the loss is chunked. Full fine-tuning of a bf16 model stays in bf16.
    "unsloth": Stack(
        "unsloth, unsloth-zoo: unsloth/models/loader.py (use_gradient_checkpointing), "
        "unsloth_zoo/training_utils.py (prepare_model_for_training), models/vision.py (post_patch_model)",
        checkpointing="offload",
        optimizer="adamw_torch_fused",
        trained={"full": "bfloat16"},
        assumptions=("unsloth's fused kernels keep less than transformers' layers: an upper bound.",),
    ),
    # Everything is bf16, logits are computed in eight chunks, all of them kept, and the base is quantised in shards.
    "torchtune": Stack(
        "torchtune 0.6: recipes/configs/llama3_1/8B_{full,lora,qlora}_single_device.yaml (dtype, optimizer, "
        "enable_activation_checkpointing), torchtune/modules/loss/ce_chunked_output_loss.py",
        loss="chunked_logits",
        checkpointing="full",
        optimizer="adamw_torch_fused",
        precision="bf16_true",
        quantises_whole=False,
        assumptions=("torchtune's models are its own: planned with transformers' layers.",),
    ),
}
