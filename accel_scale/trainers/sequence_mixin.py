"""Ulysses sequence parallelism in HF `Trainer`: ranks of a group read the same rows and hold a share of each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_scale.errors import ConfigError
from accel_scale.modeling.packing.row_facts import ROW_FACTS
from accel_scale.optimization.loss import count_loss_tokens
from accel_scale.parallel.layout import ParallelLayout, build_mesh
from accel_scale.parallel.sequence import check_ulysses, cut_batch, enable_ulysses, pad_rows

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedConfig

# Keys of whole rows: where documents begin, which attention here derives from position ids of whole rows.
_DERIVED_KEYS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", ROW_FACTS}


class SequenceParallelMixin:
    """Put first among a trainer's base classes, with `FastLossMixin` further back, whose hooks it implements.

    The engine below (DDP, FSDP2, ZeRO) treats every rank as data-parallel: gradients are averaged and weights sharded
    over all ranks. Data loaders count groups, `held_part` cuts the rows read by a group, and each rank's loss is its
    part's share of the global loss.

    Args:
        sp_size: Number of neighbouring ranks that share each row; 1 leaves the trainer as it is.
    """

    sp_size: int = 1
    _sp_group: Any = None

    def __init__(self, *args: Any, sp_size: int = 1, **kwargs: Any) -> None:
        self.sp_size = sp_size
        super().__init__(*args, **kwargs)
        if sp_size > 1:
            check_trainer(self)
            self._share_rows()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.sp_size > 1:
            read_rows_in_groups(self.accelerator, self.sp_size)  # type: ignore[attr-defined]

    def _share_rows(self) -> None:
        trainer: Any = self
        accelerator, model = trainer.accelerator, trainer.model
        layout = ParallelLayout(dp_replicate=accelerator.num_processes // self.sp_size, sp=self.sp_size)
        self._sp_group = build_mesh(layout, accelerator.device.type)["sp"].get_group()
        enable_ulysses(model, self._sp_group)
        check_on_twin(model.config, self.sp_size)

    def held_part(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's part of a micro-batch's rows; `FastLossMixin` computes its loss."""
        if self.sp_size == 1:
            return inputs
        rows = {name: value for name, value in inputs.items() if name not in _DERIVED_KEYS}
        padded = pad_rows(rows, self.sp_size, pad_token_id=self.processing_class.pad_token_id)  # type: ignore[attr-defined]
        return cut_batch(padded, dist.get_rank(self._sp_group), self.sp_size)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.sp_size > 1:  # transformers restores Accelerate's after each evaluation
            self.gather_function = self._gather_once_per_row
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: object = None) -> Any:
        """The mean over the labelled tokens of whole rows, on each rank that has a part of them."""
        trainer: Any = self
        if self.sp_size == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        inputs = trainer._prepare_inputs(inputs)
        num_labelled = count_loss_tokens(inputs["labels"]).clamp(min=1)
        with torch.no_grad(), trainer.compute_loss_context_manager():
            # Multiplied by the number of processes, as for a mean of gradients over them.
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_labelled) / dist.get_world_size()
        dist.all_reduce(loss, group=self._sp_group)
        return loss.detach(), None, None

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Labelled tokens of the global batch: transformers sums over all ranks, but ranks of a group share rows."""
        num_items = super()._get_num_items_in_batch(*args, **kwargs)  # type: ignore[misc]
        return num_items if num_items is None or self.sp_size == 1 else num_items / self.sp_size

    def get_total_train_batch_size(self, args: object) -> int:
        total: int = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return total // self.sp_size

    def _gather_once_per_row(self, values: object, *args: object, **kwargs: object) -> Any:
        """Replaces Accelerate's `gather_for_metrics` in evaluation: takes the values of one rank of each group."""
        accelerator = self.accelerator  # type: ignore[attr-defined]
        gathered = accelerator.gather(values)
        once = gathered.unflatten(0, (accelerator.num_processes, -1))[:: self.sp_size].flatten(0, 1)
        state = accelerator.gradient_state
        # The last batch is filled up with rows seen before.
        is_filled_up = state.end_of_dataloader and state.remainder > 0
        return once[: state.remainder] if is_filled_up else once


def check_trainer(trainer: Any) -> None:
    """Refuse settings whose loss on parts of rows would be different or undefined.

    Raises:
        ConfigError: for the first such setting.
    """
    args = trainer.args
    problems = {
        "--loss_type": not trainer._fast_loss_covers_run and "this run's loss is not a sum over tokens",
        "--neftune_noise_alpha": args.neftune_noise_alpha and "NEFTune's noise depends on the length of whole rows",
        "--torch_compile": args.torch_compile and "layers are not compiled",
        "--average_tokens_across_devices": not args.average_tokens_across_devices and "a part has no mean of its own",
    }
    for place, problem in problems.items():
        if problem:
            raise ConfigError(f"{problem} under sequence parallelism.", place=place, fix="leave it out, or --sp_size.")


def read_rows_in_groups(accelerator: Accelerator, size: int) -> None:
    """Make data loaders prepared by `accelerator` give the same rows to each run of `size` neighbouring ranks."""

    @functools.wraps(type(accelerator).prepare_data_loader)
    def prepare(
        data_loader: object, device_placement: bool | None = None, slice_fn_for_dispatch: object = None
    ) -> Any:
        from accelerate.data_loader import prepare_data_loader

        del slice_fn_for_dispatch  # for one process that reads for all, which would give each rank other rows
        prepared = data_loader
        if not getattr(data_loader, "_is_accelerate_prepared", False):
            prepared = prepare_data_loader(
                data_loader,
                accelerator.device,
                num_processes=accelerator.num_processes // size,
                process_index=accelerator.process_index // size,
                split_batches=accelerator.split_batches,
                put_on_device=accelerator.device_placement if device_placement is None else device_placement,
                rng_types=accelerator.rng_types.copy(),
                dispatch_batches=False,
                even_batches=accelerator.even_batches,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=accelerator.dataloader_config.data_seed,
                non_blocking=accelerator.non_blocking,
                use_stateful_dataloader=accelerator.use_stateful_dataloader,
            )
        if prepared not in accelerator._dataloaders:
            accelerator._dataloaders.append(prepared)
        return prepared

    accelerator.prepare_data_loader = prepare


def check_on_twin(config: PreTrainedConfig, size: int) -> None:
    """Compare parts of rows with whole rows on a small model of `config`, in fp32 on the CPU; collective.

    The run's own weights may be in host memory, sharded or quantised, and its group may support only tensors on an
    accelerator. Skipped if there is no small model whose number of heads is a multiple of the ranks.

    Raises:
        ConfigError: as in `check_ulysses`.
    """
    from accel_scale.facts.device import CPU
    from accel_scale.modeling.attention import resolve_attention
    from accel_scale.modeling.model_class import numbers_of_layers
    from accel_scale.start_check.twin import NoTwin, build_twin, undisturbed

    group, _ = dist.new_subgroups(group_size=size, backend="gloo")
    attention = resolve_attention(None, device=CPU, dtype=torch.float32, packing=False, model_config=config)
    with undisturbed():
        try:
            twin = build_twin(config, attention=attention)
        except NoTwin:
            return
        if all(n % size == 0 for n in numbers_of_layers(twin.config.get_text_config(), "num_attention_heads")):
            enable_ulysses(twin, group)
            check_ulysses(twin, group)
