"""Training rows: the same order for any number of ranks and workers, resuming anywhere, and refusals."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_scale.data.loaders import outlive_signals
from accel_scale.data.pretraining import load_pretraining_tokenizer, merge_states, open_pretraining_data
from accel_scale.data.pretraining.opened import PretrainingData
from accel_scale.errors import ConfigError

GLOBAL_BATCH = 8
BYTE = load_pretraining_tokenizer("byte")
EOS = BYTE.eos_token_id


@pytest.fixture
def corpus(tmp_path: Path, write_jsonl: Callable[..., str]) -> list[str]:
    """A mixture of JSON lines and one continuous text file."""
    draw = random.Random(1)
    rows = [{"text": f"document {index} " + "word " * draw.randrange(60)} for index in range(1500)]
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Line {index} of the book, é.\n" for index in range(8000)))
    return [f"{write_jsonl('rows.jsonl', rows)}=0.75", f"{book}=0.25"]


def open_data(data: Any, **options: Any) -> PretrainingData:
    return open_pretraining_data(
        data, **{"tokenizer": BYTE, "row_length": 64, "isolate_documents": True, "seed": 3, **options}
    )


def take(
    data: PretrainingData,
    steps: int,
    *,
    world_size: int = 1,
    num_workers: int = 0,
    micro_batch_size: int = 1,
    state: dict[str, Any] | None = None,
    global_batch_size: int = GLOBAL_BATCH,
) -> tuple[list[list[Any]], dict[str, Any]]:
    """Returns (rows of each global batch, the merged state after them)."""
    loaders = [
        data.train_loader(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            num_workers=num_workers,
            state=state,
        )
        for rank in range(world_size)
    ]
    batches = []
    for _ in range(steps):
        rows: list[Any] = []
        for loader in loaders:
            step = next(loader)
            for micro_batch, names in zip(step.micro_batches, step.row_ids, strict=True):
                assert {values.dtype for values in micro_batch.values()} == {torch.int64}
                assert all(len(values) == micro_batch_size for values in micro_batch.values())
                rows += zip(*(values.tolist() for values in micro_batch.values()), names, strict=True)
        batches.append(rows)
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.close()
    return batches, json.loads(json.dumps(merge_states(states[::-1])))


def test_one_order_for_all_ranks_workers_and_micro_batches(corpus) -> None:
    data = open_data(corpus)
    expected, state = take(data, 12)
    for world_size, num_workers, micro_batch_size in ((1, 1, 8), (1, 2, 2), (2, 0, 4), (2, 1, 1), (4, 0, 2)):
        found = take(data, 12, world_size=world_size, num_workers=num_workers, micro_batch_size=micro_batch_size)
        assert found == (expected, state)
    other, _ = take(open_data(corpus, seed=4), 12)
    assert other != expected


def test_resuming_anywhere_on_any_number_of_ranks_goes_on_as_if_uninterrupted(corpus) -> None:
    data = open_data(corpus)
    expected, end = take(data, 16)
    for steps in (1, 7):
        first, state = take(data, steps)
        assert first == expected[:steps]
        for world_size, num_workers in ((1, 0), (4, 0), (2, 1)):
            rest, last = take(
                open_data(corpus), 16 - steps, world_size=world_size, num_workers=num_workers, state=state
            )
            assert rest == expected[steps:]
            assert last == end


def test_the_state_is_that_of_the_last_step_consumed_however_far_workers_ran_ahead(corpus) -> None:
    data = open_data(corpus)
    _, expected = take(data, 2)
    with data.train_loader(global_batch_size=GLOBAL_BATCH, micro_batch_size=8, num_workers=2) as loader:
        steps = [next(loader), next(loader)]
        assert loader.state_dict() == expected
        assert expected["version"] == 1  # the version that the first checkpoints have
        assert loader.step == 2
        assert loader.wait_seconds >= loader.last_wait_seconds > 0
    # Skipping a step means taking it without training on it.
    with data.train_loader(global_batch_size=GLOBAL_BATCH, micro_batch_size=8, state=expected) as loader:
        assert next(loader).row_ids != steps[1].row_ids


def test_closing_ends_the_workers(corpus) -> None:
    loader = open_data(corpus).train_loader(global_batch_size=GLOBAL_BATCH, micro_batch_size=8, num_workers=2)
    next(loader)
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    loader.close()
    assert not multiprocessing.active_children()
    assert list(loader) == []


def test_what_workers_are_given_survives_pickling(corpus) -> None:
    """Workers are forked on Linux; with other start methods they get a copy."""
    data = open_data(corpus)
    expected, _ = take(data, 3)
    copy = pickle.loads(pickle.dumps(data))
    assert take(copy, 3)[0] == expected


def test_labels_and_positions_stop_at_documents(corpus) -> None:
    batches, _ = take(open_data(corpus), 20)
    for ids, labels, positions, name in (row for batch in batches for row in batch):
        begins = [index for index, label in enumerate(labels) if label == -100]
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
        after_eos = [index + 1 for index, token in enumerate(ids[:-1]) if token == EOS]
        assert set(after_eos) <= set(begins)
        expected = [index - max([0, *(begin for begin in begins if begin <= index)]) for index in range(64)]
        assert positions == expected
        assert name.split(":")[0] in ("rows.jsonl", "book.txt")


def test_rows_without_isolation_have_no_positions(corpus) -> None:
    step = next(open_data(corpus, isolate_documents=False).train_loader(global_batch_size=4, micro_batch_size=2))
    assert [set(batch) for batch in step.micro_batches] == [{"input_ids", "labels"}] * 2
    predicted = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step.micro_batches)
    assert step.num_predicted == predicted


def test_shares_are_shares_of_tokens(corpus) -> None:
    batches, _ = take(open_data(corpus), 100)
    counts = Counter(row[-1].split(":")[0] for batch in batches for row in batch)
    assert counts["rows.jsonl"] == pytest.approx(600, abs=2)
    assert all(sum(row[-1].startswith("book") for row in batch) == 2 for batch in batches)  # in each batch too


def test_a_row_id_leads_to_the_text(corpus) -> None:
    data = open_data(corpus)
    for row in take(data, 6)[0][-1]:
        shown = data.row_text(row[-1])
        texts = "".join(part.split("\n", 1)[1] for part in f"\n{shown}".split("\n── ")[1:])
        assert texts == BYTE.decode(row[0])
    assert "book.txt, byte" in shown or "rows.jsonl:" in shown
    with pytest.raises(ConfigError, match="not a row id"):
        data.row_text("nonsense")
    with pytest.raises(ConfigError, match="no source is called"):
        data.row_text("other:1:2")


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_batches_that_do_not_divide_are_refused(corpus) -> None:
    data = open_data(corpus)
    with pytest.raises(ConfigError, match="not a multiple of 3 rows on each of 2 ranks"):
        data.train_loader(global_batch_size=8, micro_batch_size=3, world_size=2)
    with pytest.raises(ConfigError, match="no rank 2 of 2"):
        data.train_loader(global_batch_size=8, micro_batch_size=1, rank=2, world_size=2)


def test_states_of_other_runs_are_refused(corpus) -> None:
    _, state = take(open_data(corpus), 1)
    for options, problem in (
        ({"seed": 9}, "the seed changed"),
        ({"row_length": 32}, "the row length changed"),
        ({"validation_share": 0.1}, "the data"),
    ):
        with pytest.raises(ConfigError, match=problem):
            take(open_data(corpus, **options), 1, state=state)
    with pytest.raises(ConfigError, match="the global batch size changed"):
        take(open_data(corpus), 1, state=state, global_batch_size=4)
    part = open_data(corpus).train_loader(global_batch_size=8, micro_batch_size=1, world_size=2).state_dict()
    with pytest.raises(ConfigError, match="merge_states"):
        open_data(corpus).train_loader(global_batch_size=8, micro_batch_size=1, state=part)
    with pytest.raises(ConfigError, match="4 of the global batch's 8 rows"):
        merge_states([part])


def test_a_bad_row_stops_training_with_its_line(write_jsonl) -> None:
    path = write_jsonl("rows.jsonl", [{"text": "fine"}] * 50 + [{"text": 7}])
    for num_workers in (0, 1):
        loader = open_data(path).train_loader(global_batch_size=1, micro_batch_size=1, num_workers=num_workers)
        with pytest.raises(ConfigError, match="holds int") as error:
            list(loader)
        assert error.value.place == f"{path}:51"


def test_data_without_text_is_refused(write_jsonl) -> None:
    loader = open_data(write_jsonl("empty.jsonl", [{"text": ""}] * 9)).train_loader(
        global_batch_size=1, micro_batch_size=1
    )
    with pytest.raises(ConfigError, match="has no text"):
        next(loader)


def test_memory_stays_flat(write_jsonl) -> None:
    """Blocks come and go; private memory after 200 steps is as after 60. A benchmark has the long version."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")

    def private_bytes() -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    rows = [{"text": "some words of a document " * (index % 20)} for index in range(20_000)]
    loader = open_data(write_jsonl("rows.jsonl", rows), row_length=256).train_loader(
        global_batch_size=16, micro_batch_size=16
    )
    for _ in range(60):
        next(loader)
    before = private_bytes()
    for _ in range(140):
        next(loader)
    assert private_bytes() < before * 1.1


def test_states_are_joined_of_one_step_of_one_run_in_the_order_of_rows() -> None:
    run = {"global_batch_size": 11, "seed": 1}

    def of(*lanes: int, step: int = 3, **changes: Any) -> dict[str, Any]:
        return {"version": 1, "step": step, "run": {**run, **changes}, "lanes": {str(lane): lane for lane in lanes}}

    joined = merge_states([of(10, 2, 3), of(0, 1, 4, 5, 6, 7, 8, 9)])
    assert list(joined["lanes"]) == [str(lane) for lane in range(11)]
    assert (joined["step"], joined["run"]) == (3, run)
    with pytest.raises(ConfigError, match="states of steps 3 and 4 of one run"):
        merge_states([of(0), of(1, step=4)])
    with pytest.raises(ConfigError, match=r"states of steps 3 and 3 of the seed changed \(1, now 2\)"):
        merge_states([of(0), of(1, seed=2)])
    with pytest.raises(ConfigError, match="1 of the global batch's 11 rows"):
        merge_states([of(*range(10))])
    with pytest.raises(ConfigError, match="no states"):
        merge_states([])


def test_workers_end_with_their_loader_and_with_a_bad_row(corpus, write_jsonl) -> None:
    data = open_data(corpus)
    unused = data.train_loader(global_batch_size=2, micro_batch_size=1, num_workers=1)
    unused.close()
    unused.close()
    with data.train_loader(global_batch_size=2, micro_batch_size=1, num_workers=1) as used:
        next(used)
        assert multiprocessing.active_children()
    assert not multiprocessing.active_children()
    with pytest.raises(StopIteration):
        next(used)
    path = write_jsonl("bad.jsonl", [{"text": "fine"}] * 50 + [{"text": 7}])
    bad = open_data(path).train_loader(global_batch_size=1, micro_batch_size=1, num_workers=1)
    with pytest.raises(ConfigError, match="holds int"):
        list(bad)
    assert not multiprocessing.active_children()


def test_a_worker_outlives_what_a_scheduler_sends_to_its_whole_group() -> None:
    if not hasattr(signal, "sigwaitinfo"):
        pytest.skip("macOS has no sigwaitinfo")
    ready, told = os.pipe()
    worker = os.fork()
    if worker == 0:
        try:
            outlive_signals(0)
            os.write(told, b"x")
            time.sleep(20)
        finally:
            os._exit(9)
    os.close(told)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    for number in ("-INT", "-USR1", "-TERM"):
        subprocess.run(["kill", number, str(worker)], check=True)
    time.sleep(0.05)
    assert os.waitpid(worker, os.WNOHANG) == (0, 0)
    os.kill(worker, signal.SIGTERM)  # from the process that owns it
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
