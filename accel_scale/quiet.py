"""Silence, one by one, library messages that nobody can act on; everything else gets through."""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class _Silenced(logging.Filter):
    """Drops the records of one logger whose whole message matches `pattern`.

    Attributes:
        cpu_only: Whether to drop them only where torch was built for CPUs; elsewhere they may mean something.
    """

    logger: str
    pattern: str
    cpu_only: bool = False

    def filter(self, record: logging.LogRecord) -> bool:
        if not re.fullmatch(self.pattern, record.getMessage(), re.DOTALL):
            return True
        return self.cpu_only and not _torch_is_cpu_only()


# Checked on torchao 0.18.0, bitsandbytes 0.50.2, torch 2.13.0, deepspeed 0.19.8; tests/unit/test_quiet.py fails when
# one of them changes its wording.
_LOG_RECORDS = (
    # torchao tries to load its CUDA kernels on every build of torch.
    _Silenced("torchao", r"Failed to load \S*/torchao/_C\S*\.so: Could not load this library: .*", cpu_only=True),
    # torchao registers its enums in a way that torch no longer needs.
    _Silenced("torch.utils._pytree", r"<enum '(KernelPreference|ScaleCalculationMode)'> is an Enum subclass .*"),
    # An optional faster 4-bit kernel for CPUs, downloaded at import time.
    _Silenced(
        "bitsandbytes.backends.cpu.ops",
        r"Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'.*",
    ),
    _Silenced("DeepSpeed", r"Setting accelerator to CPU\. If you have GPU .*", cpu_only=True),
)
_WARNINGS = (
    # torchao's quantised states lack an optional hash; compiled steps are merely not cached on disk.
    r"OptimState(4|8)bit does not implement _stable_hash_for_caching",
    # check_optimizer reports this in its own words.
    r"Paged optimizers are not supported on CPU",
)


def _torch_is_cpu_only() -> bool:
    import torch

    return torch.version.cuda is None and torch.version.hip is None and not torch.xpu.is_available()


def quiet_imports() -> None:
    """Call before importing torchao, bitsandbytes or DeepSpeed. Costs nothing and imports none of them."""
    for silenced in _LOG_RECORDS:
        logger = logging.getLogger(silenced.logger)
        if silenced not in logger.filters:
            logger.addFilter(silenced)
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
