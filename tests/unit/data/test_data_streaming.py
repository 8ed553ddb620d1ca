"""Streams: each row exactly once across ranks and workers, shuffled, for any number of files."""

from __future__ import annotations

from itertools import pairwise

import pytest

from accel_scale.data import opened
from accel_scale.data.loading import load_training_data
from accel_scale.data.spans import spans_of

NUM_ROWS = 600


def rows(first: int, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {i}", "completion": str(i)} for i in range(first, first + count)]


@pytest.fixture
def stream_of(write_jsonl, tmp_path, monkeypatch):
    """``stream_of(num_files, span_bytes)``: a stream of 600 rows over `num_files` files, cut into spans."""

    def make(num_files: int, span_bytes: int = 1 << 30, **arguments):
        each = NUM_ROWS // num_files
        for index in range(num_files):
            write_jsonl(f"set/part{index}.jsonl", rows(index * each, each))
        monkeypatch.setattr(opened, "SPAN_BYTES", span_bytes)
        return load_training_data(str(tmp_path / "set"), streaming=True, **arguments)

    return make


def numbers(stream) -> list[int]:
    return [int(row["completion"]) for row in stream]


@pytest.mark.parametrize(("num_files", "span_bytes"), [(1, 1 << 30), (1, 4000), (4, 1 << 30), (3, 2000)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_rows_without_a_duplicate(stream_of, num_files, span_bytes, world_size) -> None:
    from datasets.distributed import split_dataset_by_node

    data = stream_of(num_files, span_bytes)
    assert data.num_rows is None
    per_rank = [
        numbers(split_dataset_by_node(data.train, rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    assert sorted(number for part in per_rank for number in part) == list(range(NUM_ROWS))
    assert min(len(part) for part in per_rank) > NUM_ROWS // world_size // 2


def test_one_big_file_has_a_shard_for_every_span(stream_of, tmp_path) -> None:
    data = stream_of(1, 4000)
    path = str(tmp_path / "set" / "part0.jsonl")
    spans = spans_of(path, span_bytes=4000)
    assert data.train.num_shards == len(spans) > 4
    assert all(left.end == right.start for left, right in pairwise(spans))
    with open(path, "rb") as file:
        for span in spans:
            file.seek(span.start)
            assert file.readline().startswith(b'{"prompt"')


@pytest.mark.slow
def test_loader_workers_share_the_rows_too(stream_of) -> None:
    from torch.utils.data import DataLoader

    data = stream_of(3, 2000, on_bad_row="skip")
    loader = DataLoader(data.train, batch_size=None, num_workers=2)
    assert sorted(numbers(loader)) == list(range(NUM_ROWS))


@pytest.mark.slow
def test_workers_report_what_they_skip(write_jsonl, tmp_path) -> None:
    from torch.utils.data import DataLoader

    for index in range(2):
        write_jsonl(f"set/part{index}.jsonl", [*rows(index * 10, 10), "broken"])
    data = load_training_data(str(tmp_path / "set"), streaming=True, on_bad_row="skip")
    assert len(list(DataLoader(data.train, batch_size=None, num_workers=2))) == 20
    assert data.skipped_reasons == {"not valid JSON": 2}


@pytest.mark.parametrize("span_bytes", [1 << 30, 4000])
def test_accelerate_gives_each_rank_its_own_rows(stream_of, span_bytes) -> None:
    from accelerate import PartialState
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    PartialState(cpu=True)
    data = stream_of(1, span_bytes)
    seen = []
    for rank in range(2):
        loader = DataLoader(data.train, batch_size=10, collate_fn=numbers)
        prepared = prepare_data_loader(
            loader, num_processes=2, process_index=rank, dispatch_batches=False, put_on_device=False
        )
        seen += [number for batch in prepared for number in batch]
    assert sorted(seen) == list(range(NUM_ROWS))


def test_shuffled_in_a_buffer_and_differently_each_epoch(stream_of) -> None:
    stream = stream_of(1, shuffle_buffer_rows=100).train
    first = numbers(stream)
    assert first != sorted(first)
    assert sorted(first) == list(range(NUM_ROWS))
    assert numbers(stream) == first
    stream.set_epoch(1)
    assert numbers(stream) != first
    # The buffer holds 100 rows, so no row comes out more than 100 places before its own.
    assert all(number - place <= 100 for place, number in enumerate(first))


def test_line_numbers_inside_a_span(stream_of, tmp_path, monkeypatch, write_jsonl) -> None:
    lines: list[object] = rows(0, 200)
    lines[150] = "broken"
    path = write_jsonl("one.jsonl", lines)
    monkeypatch.setattr(opened, "SPAN_BYTES", 1000)
    data = load_training_data(path, streaming=True, on_bad_row="skip")
    assert data.train.num_shards > 5
    assert len(list(data.train)) == 199
    assert data._log is not None
    with open(data._log.path) as file:
        assert f"{path}:151" in file.read()


def test_a_stream_resumes_where_it_stopped(stream_of) -> None:
    stream = stream_of(2).train
    iterator = iter(stream)
    before = [next(iterator)["completion"] for _ in range(250)]
    state = stream.state_dict()
    stream.load_state_dict(state)
    after = [row["completion"] for row in stream]
    # The shuffle buffer is refilled, so the rows it held are not seen again; no row comes twice.
    assert not set(before) & set(after)
