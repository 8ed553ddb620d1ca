"""Shared fixtures: real inputs next to the checkout, and a clean accelerate state for each test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_python import WarmPython, is_possible, read_at_import

# Two workers that each start a full set of threads would fight over two cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads take cores away from the other processes
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell that starts the tests in the background makes them, and everything they launch, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
REAL_PYTHON = sys.executable
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_USE_FSDP")
FOLDERS_THAT_LAUNCH = ("distributed", "library", "recipes")


def pytest_configure() -> None:
    """Test workers that run side by side share the cores; a single process keeps torch's default."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real inputs next to the checkout; tests that need it are skipped where it is missing."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real inputs are not there: {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="module", autouse=True)
def _small_numbers_are_numbers() -> None:
    """DeepSpeed's ops are built with -ffast-math: once one is loaded, the process rounds subnormal floats to 0."""
    import torch

    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def _products_are_torchs_own() -> Iterator[None]:
    """Restore torch's default: pretraining sets the precision of fp32 matrix products for the whole process."""
    yield
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "set_float32_matmul_precision"):
        torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module", autouse=True)
def _no_launch_is_left_behind() -> Iterator[None]:
    """The next module starts outside any launch: tests that set up a distributed run need their own process."""
    before = {name: os.environ.get(name) for name in LAUNCH_VARIABLES}
    yield
    left = {name: os.environ.get(name) for name in LAUNCH_VARIABLES}
    assert left == before, "a test has left a launch's variables in this process"
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        assert not dist.is_initialized(), "a test has left a process group in this process"


@pytest.fixture(autouse=True)
def _libraries_environment_stays() -> Iterator[None]:
    """Restore what libraries read at import: with other variables than the warm servers', every launch starts cold."""
    before = read_at_import()
    yield
    for name in read_at_import().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def real_python() -> str:
    """The real Python, for tests that inspect or kill all of a process's children: nothing starts warm."""
    return REAL_PYTHON


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Servers of processes that have already imported the libraries, for this worker's tests."""
    warm = WarmPython()
    yield warm
    warm.close()


@pytest.fixture(scope="module", autouse=True)
def _launches_start_warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make ``sys.executable`` warm for tests that launch, unless their module sets ``WARM_PYTHON = False``."""
    launches = Path(request.path).parent.name in FOLDERS_THAT_LAUNCH
    is_wanted = getattr(request.module, "WARM_PYTHON", launches) and not os.environ.get("ACCEL_SCALE_COLD_TESTS")
    if not is_wanted or not is_possible():
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", str(request.getfixturevalue("warm_python").executable))
        yield


def pytest_collection_finish() -> None:
    """Collect garbage among the tests' objects only, not among the libraries' hundreds of thousands."""
    gc.collect()
    gc.freeze()
