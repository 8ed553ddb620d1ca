"""Console output: one process prints, progress bars only on a terminal, no library chatter below errors."""

from __future__ import annotations

import logging
import os
import sys
import warnings


def set_up_console(*, is_main: bool, verbose: bool = False) -> None:
    """Call once per process, before models and data are loaded.

    Args:
        is_main: Whether this is the process that prints.
        verbose: Leave the libraries' own messages unchanged, as requested with ``--log_level``.
    """
    import datasets
    from transformers.utils import logging as transformers_logging

    if not (is_main and sys.stderr.isatty()):
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if verbose:
        return
    transformers_logging.set_verbosity_error()
    datasets.logging.set_verbosity_error()
    for name in ("trl", "peft", "accelerate", "DeepSpeed", "torch.distributed", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Deprecation warnings inside the libraries are theirs to fix, not the user's. Errors still raise.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    if not is_main:
        warnings.simplefilter("ignore")
