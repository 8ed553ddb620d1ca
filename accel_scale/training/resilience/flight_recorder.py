"""Read torch's flight recorder: how many collectives this rank has begun, and which one is unfinished.

Private API of torch, used only here: checked on torch 2.13 with gloo. NCCL's recorder has the same layout.
`tests/distributed/test_hang.py` fails if it changes.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any


def num_collectives() -> int:
    """Number of collectives begun so far, over all process groups; 0 if torch does not tell."""
    import torch.distributed as dist

    total = 0
    with contextlib.suppress(Exception):  # a group that the main program is creating or destroying
        for group in list(dist.distributed_c10d._world.pg_map):
            total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return total


def unfinished_collective() -> str | None:
    """Name of the oldest collective that was begun and is not done, e.g. ``all_reduce``; None if there is none."""
    import torch

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump: Any = getattr(torch._C._distributed_c10d, name, None)
        if dump is None:
            continue
        with contextlib.suppress(Exception):
            entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
            waiting = [entry for entry in entries if not entry.get("retired", True)]
            if waiting:
                first = min(waiting, key=lambda entry: entry.get("time_created_ns", 0))
                return str(first["profiling_name"]).partition(":")[2].lstrip("_") or None
    return None
