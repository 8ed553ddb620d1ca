"""BatchNorm normalizes over one micro-batch of one rank, not the global batch: warn about it, or synchronize ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from accel_scale.errors import ConfigError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Devices that torch's SyncBatchNorm supports (2.13).
_SYNCHRONISED_ON = ("cuda", "xpu")


def settle_batch_norm(
    model: nn.Module,
    *,
    sync: bool,
    device_type: str,
    num_processes: int,
    accumulation: int,
    say: Callable[[str], None],
) -> nn.Module:
    """Replace BatchNorm by `SyncBatchNorm` if `sync` is set; warn if BatchNorm sees only part of the global batch.

    Parameters keep their identity. Layers that are not trained, as in a frozen base, are left alone.

    Args:
        say: Prints one line, on one process.

    Raises:
        ConfigError: if there is no BatchNorm to train, or SyncBatchNorm does not support the device.
    """
    found = [module for module in model.modules() if isinstance(module, _BATCH_NORMS)]
    found = [module for module in found if any(parameter.requires_grad for parameter in module.parameters())]
    if sync and not found:
        raise ConfigError(
            f"{type(model).__name__} has no BatchNorm that trains.",
            place="ScalePlugin(sync_batch_norm=)",
            fix="remove it.",
        )
    if sync and num_processes > 1:
        if device_type not in _SYNCHRONISED_ON:
            raise ConfigError(
                f"torch has no SyncBatchNorm for {device_type}.",
                place="ScalePlugin(sync_batch_norm=)",
                fix="remove it for runs on this device, or use GroupNorm, which does not depend on the batch.",
            )
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if found and (accumulation > 1 or (num_processes > 1 and not sync)):
        rows = "of a micro-batch" + (" on one rank" if num_processes > 1 and not sync else "")
        fixes = ["sync_batch_norm=True"] if num_processes > 1 and not sync else []
        fixes += ["larger micro-batches with less accumulation"] if accumulation > 1 else []
        say(
            f"warning: {len(found)} BatchNorm layers see the rows {rows}, not those of the global batch. "
            f"Fix: {' and '.join(fixes)}, or GroupNorm."
        )
    return model
