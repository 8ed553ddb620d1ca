"""Names in a checkpoint and in a model: transformers renames, fuses and splits weights when loading and saving.

`StoredWeights` uses the loading part of the private ``core_model_loading`` (checked on 5.23), `as_saved` the saving
part; tests/unit/test_adapter_targets.py and test_model_class.py fail if they change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel


def as_saved(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert `tensors` of `model` to the names and pieces that `save_pretrained` writes."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def remember_used_conversions(model: nn.Module) -> None:
    """Make a save of `model` revert only the conversions that its checkpoint needed, as after `from_pretrained`.

    Under ZeRO-3 transformers records all conversions of the architecture, and would revert some that never took place.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        model._weight_conversions = [entry for entry in conversions if entry.was_used()]  # type: ignore[assignment]


class StoredWeights:
    """Maps the tensors of a checkpoint to the tensors of a model.

    Args:
        model: May be on the meta device. It records which conversions the checkpoint needs, as after
            `from_pretrained`, so that `as_saved` reverts them.
        stored: All names in the checkpoint.
    """

    def __init__(self, model: PreTrainedModel, stored: Iterable[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        self.model = model
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        own, prefix = model.state_dict(), model.base_model_prefix
        # A group is converted together and named after the first tensor it makes: its stored tensors with the patterns
        # they matched, all names that it makes, and the conversion if it does more than rename.
        self._stored: dict[str, list[tuple[str, str]]] = {}
        self._made: dict[str, list[str]] = {}
        self._converters: dict[str, WeightConverter] = {}
        self.group_of: dict[str, str] = {}
        for name in sorted(stored, key=dot_natural_key):
            made, pattern = rename_source_key(name, renamings, converters, prefix, own)
            if made not in own and name in own:
                made, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=own)
            if made not in own:
                continue  # not used by this model
            self._stored.setdefault(made, []).append((name, pattern or name))
            self.group_of[name], self._made[made] = made, [made]
            if pattern is not None:
                self._converters[made] = by_pattern[pattern]
                first, *others = by_pattern[pattern].target_patterns
                self._made[made] += [made.replace(first, other) for other in others]
        self._maker = {name: group for group, names in self._made.items() for name in names}
        if getattr(model, "_weight_conversions", None) is None:
            model._weight_conversions = mapping  # type: ignore[assignment]
            remember_used_conversions(model)

    def made_by(self, group: str) -> list[str]:
        """The model's tensors made from a group of stored ones."""
        return self._made[group]

    def names_for(self, name: str) -> list[str]:
        """Stored tensors that make the model's tensor `name`; empty if there are none."""
        group = self._maker.get(name)
        return [stored for stored, _ in self._stored[group]] if group else []

    def read(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Build the model's tensor `name` from the stored ones, each loaded by `read`."""
        group = self._maker[name]
        if group not in self._converters:
            return read(self._stored[group][0][0])
        converter = copy.deepcopy(self._converters[group])
        for stored, pattern in self._stored[group]:
            converter.add_tensor(group, stored, pattern, read(stored))  # type: ignore[arg-type]
        made = converter.convert(group, model=self.model, config=self.model.config)[name]
        return made[0] if isinstance(made, list) else made

    def write(self, group: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert all `tensors` of `group` to the names and pieces of the checkpoint."""
        if group not in self._converters:
            return {self._stored[group][0][0]: tensors[group]}
        prefix, result = f"{self.model.base_model_prefix}.", {}
        for name, tensor in as_saved(self.model, tensors).items():
            spellings = (name, name.removeprefix(prefix), prefix + name)
            result[next(n for n in spellings if n in self.group_of)] = tensor.contiguous()
        return result


def stored_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Map each of `names` to the name that `save_pretrained` gives it; for tensors that are not split or fused."""
    import torch

    return {name: next(iter(as_saved(model, {name: torch.empty(0, device="meta")}))) for name in names}
