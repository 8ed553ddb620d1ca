"""How the GPUs of this machine are connected, according to `nvidia-smi topo -m`."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from accel_scale.launching.machine import LocalMachine

# Row i, column j: the link between visible devices i and j, such as ``NV12`` or ``SYS``; ``X`` on the diagonal.
LinkTable = tuple[tuple[str, ...], ...]
_LINK = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|NV\d+")
_UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")  # in the header, on a terminal and in a pipe
_ASK_SECONDS = 10.0  # a driver without persistence has to start first


def with_gpu_links(machine: LocalMachine, gpu_ids: object = None) -> LocalMachine:
    """`machine` with the links of its GPUs, if it has several NVIDIA GPUs that ``nvidia-smi`` describes.

    Args:
        machine: This machine.
        gpu_ids: GPUs that the launcher will choose, as in a launch file; None: those that this process sees.
    """
    if not machine.accelerator.is_nvidia or machine.num_devices < 2:
        return machine
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES") if gpu_ids in (None, "all") else str(gpu_ids)
    return replace(machine, gpu_links=visible_links(parse_links(_asked()), chosen))


def parse_links(text: str) -> LinkTable:
    """The table in the output of ``nvidia-smi topo -m``; empty if there is none that can be parsed."""
    lines = [_UNDERLINE.sub("", line).split() for line in text.splitlines()]
    header = next((line for line in lines if line[:1] == ["GPU0"] and not any(map(_LINK.fullmatch, line[1:2]))), [])
    count = next((i for i, name in enumerate(header) if name != f"GPU{i}"), len(header))
    rows = {line[0]: tuple(line[1 : count + 1]) for line in lines if line and line is not header}
    table = tuple(rows.get(f"GPU{i}", ()) for i in range(count))
    is_whole = all(
        len(row) == count and row[i] == "X" and all(map(_LINK.fullmatch, row)) for i, row in enumerate(table)
    )
    return table if is_whole else ()


def visible_links(links: LinkTable, chosen: str | None) -> LinkTable:
    """Rows and columns of the devices in `chosen`, in its order; empty if it does not name them by number.

    Args:
        links: Links of all devices.
        chosen: Devices as in `CUDA_VISIBLE_DEVICES`; None: all.
    """
    if chosen is None:
        return links
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if not all(name.isdigit() and int(name) < len(links) for name in names):
        return ()
    return tuple(tuple(links[int(row)][int(column)] for column in names) for row in names)


def pairs_without_nvlink(links: LinkTable, devices: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs among `devices` that are connected by something other than NVLink."""
    return [(a, b) for a, b in combinations(devices, 2) if not links[a][b].startswith("NV")]


def describe_links(links: LinkTable) -> str:
    """A table's cell: ``NVLink (NV12) between all``, ``NVLink joins 0-1, 2-3; else PHB``, ``PXB, SYS; no NVLink``."""
    pairs = list(combinations(range(len(links)), 2))
    slow = pairs_without_nvlink(links, range(len(links)))
    kinds = ", ".join(sorted({links[a][b] for a, b in slow}))
    if not slow:
        return f"NVLink ({', '.join(sorted({links[a][b] for a, b in pairs}))}) between all"
    joined = ", ".join(f"{a}-{b}" for a, b in pairs if (a, b) not in slow)
    return f"NVLink joins {joined}; else {kinds}" if joined else f"{kinds}; no NVLink"


def _asked() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
