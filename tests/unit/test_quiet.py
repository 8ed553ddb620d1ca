"""Heavy imports print nothing; messages that are not on the list still appear."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from accel_scale import quiet
from accel_scale.quiet import quiet_imports

IMPORTS = """
import trl, bitsandbytes, torchao, torchao.optim, torchao.float8, deepspeed
from trl import SFTConfig, SFTTrainer
import bitsandbytes.backends.cpu.ops
"""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_heavy_imports_print_nothing():
    result = _run(f"from accel_scale.quiet import quiet_imports\nquiet_imports()\n{IMPORTS}")
    assert result.returncode == 0, result.stderr
    assert result.stdout + result.stderr == ""


@pytest.mark.slow
def test_without_it_every_silenced_logger_speaks():
    """Otherwise the list would have entries that silence nothing."""
    import torch

    if torch.version.cuda is not None:
        pytest.skip("torchao and DeepSpeed say what this is about on CPU builds of torch only")
    result = _run(IMPORTS)
    output = result.stdout + result.stderr
    assert "_C" in output
    # bitsandbytes looks for this kernel on processors with bf16 arithmetic.
    if "avx512_bf16" in Path("/proc/cpuinfo").read_text():
        assert "Failed to load CPU gemm_4bit_forward" in output
    assert "KernelPreference" in output
    assert "Setting accelerator to CPU" in output


@pytest.fixture
def quietly(caplog, monkeypatch):
    """Records of the silenced loggers, which reach pytest's handler only after their filters."""
    quiet_imports()
    caplog.set_level(logging.WARNING)
    for name in ("torchao", "bitsandbytes.backends.cpu.ops", "bitsandbytes", "torch.utils._pytree", "DeepSpeed"):
        # Another test in this process may have triggered the code that makes a library quiet.
        caplog.set_level(logging.WARNING, logger=name)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
    handler = caplog.handler
    deepspeed = logging.getLogger("DeepSpeed")  # does not propagate
    deepspeed.addHandler(handler)
    yield caplog
    deepspeed.removeHandler(handler)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchao", "Failed to load the checkpoint: file is truncated"),
        ("torchao", "Skipping import of cpp extensions due to incompatible torch version."),
        ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community: disk full"),
        ("torch.utils._pytree", "<enum 'Yours'> is an Enum subclass and is now natively supported"),
        ("DeepSpeed", "Attempting to get learning rate from scheduler before it has started"),
    ],
)
def test_other_messages_of_the_same_loggers_get_through(quietly, name, message):
    logging.getLogger(name).warning(message)
    assert message in quietly.messages or message in [r.getMessage() for r in quietly.records]


def test_a_missing_kernel_is_reported_where_torch_has_cuda(quietly, monkeypatch):
    message = "Failed to load /x/torchao/_C_mxfp8.so: Could not load this library: /x/torchao/_C_mxfp8.so"
    monkeypatch.setattr(quiet, "_torch_is_cpu_only", lambda: True)
    logging.getLogger("torchao").warning(message)
    assert not quietly.records
    monkeypatch.setattr(quiet, "_torch_is_cpu_only", lambda: False)
    logging.getLogger("torchao").warning(message)
    assert [record.getMessage() for record in quietly.records] == [message]


def test_calling_it_twice_adds_nothing():
    quiet_imports()
    counts = {s.logger: len(logging.getLogger(s.logger).filters) for s in quiet._LOG_RECORDS}
    quiet_imports()
    assert counts == {s.logger: len(logging.getLogger(s.logger).filters) for s in quiet._LOG_RECORDS}


def test_only_the_named_warnings_are_ignored():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_imports()
        warnings.warn("Paged optimizers are not supported on CPU. Falling back.", stacklevel=1)
        warnings.warn("OptimState8bit does not implement _stable_hash_for_caching.", stacklevel=1)
        warnings.warn("Paged optimizers are slow", stacklevel=1)
    assert [str(w.message) for w in caught] == ["Paged optimizers are slow"]


def test_importing_it_is_light():
    code = "import sys, accel_scale.quiet as q; q.quiet_imports(); print('torch' in sys.modules)"
    assert _run(code).stdout == "False\n"
