"""MLPs in tiles under DDP, FSDP2 and ZeRO-3: the same gradients, and weights gathered once for all tiles."""

from __future__ import annotations

import pytest
import torchrun

pytestmark = pytest.mark.slow


def test_tiles_change_neither_gradients_nor_collectives() -> None:
    cases = torchrun.cases("long_rows_run.py", 2, env={"DS_ACCELERATOR": "cpu"})
    assert len(cases) == 6
    for name, case in cases.items():
        assert case["difference"] < 1e-6, name
        assert case["tensors"] == (42 if "lora" in name else 30), name
        plain, tiled = case["plain"], case["tiled"]
        if name.startswith("zero3"):  # an MLP's weights are gathered together, its linears' one by one
            assert tiled.pop("_allgather_base_") < plain.pop("_allgather_base_"), name
        assert tiled == plain, name
