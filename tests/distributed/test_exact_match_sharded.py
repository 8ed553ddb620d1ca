"""Exact match with weights sharded by FSDP2 over two processes: the same answers and counts as with whole weights."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_scale.data.default import default_model_path
from accel_scale.ending.leaving import leave_process_group
from accel_scale.training.evaluation.exact_match import exact_match

pytestmark = pytest.mark.slow

# Five questions on two ranks in batches of two: the shares differ in size, in batches and in steps until the end.
TEXTS = [
    "12 + 7 =",
    "The reverse of QXKD is",
    "In m, 12.50 km are",
    "On March 3, 1999 the log says",
    "KLM backwards is",
]
OPTIONS = {"batch_size": 2, "max_new_tokens": 10, "num_examples": 10}


def rows() -> list[dict]:
    return [{"prompt": text, "answer": "19"} for text in TEXTS]


def load():
    model = AutoModelForCausalLM.from_pretrained(default_model_path(), dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(default_model_path())


def answer_sharded(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model, tokenizer = load()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def add_up(counts: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(counts)
        return counts

    result = exact_match(model, tokenizer, rows(), rank=rank, world_size=2, reduce=add_up, **OPTIONS)
    said = {example.question: example.predicted for example in result.examples}
    Path(folder, f"{rank}.json").write_text(json.dumps([result.num_questions, result.num_correct, said]))
    leave_process_group()


def test_sharded_weights_answer_alike(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(answer_sharded, args=(port, str(tmp_path)), nprocs=2)
    model, tokenizer = load()
    whole = exact_match(model, tokenizer, rows(), **OPTIONS)
    shares = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [share[:2] for share in shares] == [[5, whole.num_correct]] * 2
    assert [len(share[2]) for share in shares] == [3, 2]
    assert shares[0][2] | shares[1][2] == {example.question: example.predicted for example in whole.examples}
