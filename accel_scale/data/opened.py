"""An opened source: files, a saved data set or a hub data set, behind the same three methods."""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from accel_scale.data.bad_rows import BadRowPolicy, SkipLog, place_of
from accel_scale.data.cache import cache_key, cached_rows
from accel_scale.data.files import ROWS_PER_BATCH, Value
from accel_scale.data.layout import Layout, detect_layout
from accel_scale.data.reading import SAMPLE_ROWS, file_rows, read_rows, sample_rows, tables_of, usable_rows
from accel_scale.data.rows import RichTurnsFound
from accel_scale.data.sources import Source, canonical_split, file_kind, find_source, missing_split, not_whole
from accel_scale.data.spans import Span, spans_of
from accel_scale.errors import ConfigError, first_sentence
from accel_scale.facts.names import RowsWith

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, IterableDataset

# A stream of one big file is divided among ranks and workers in parts of this size.
SPAN_BYTES = 64 << 20
# Files sampled to find a layout: enough to notice a stray one, few enough for folders of thousands.
_SAMPLED_FILES = 8
# Messages of `datasets` 5.2 for a missing split, in memory-mapped and in streaming mode.
_UNKNOWN_SPLIT = re.compile(r"(?:Unknown split|Bad split)[^\[]*(\[.*?\])", re.DOTALL)

Sample = tuple[list[str], list[dict[str, Any]]]


class Opened(ABC):
    """A source with access to its rows. Subclasses: local files, and data sets of the `datasets` library."""

    def __init__(self, source: Source) -> None:
        self.source, self.name = source, source.name

    @property
    @abstractmethod
    def _samples(self) -> list[tuple[str, Sample]]:
        """(place, column names and first rows) of each sampled file or data set."""

    def column_names(self) -> list[str]:
        """Columns of the first file or of the data set."""
        return self._samples[0][1][0]

    def layout(self, mapping: Mapping[str, str], *, chat: bool, rows_with: RowsWith | None = None) -> Layout:
        """The layout of the rows; raises a ConfigError if there is none or if files differ."""
        found = [
            (place, detect_layout(place, rows, mapping=mapping, columns=names, chat=chat, rows_with=rows_with))
            for place, (names, rows) in self._samples
        ]
        (first_place, first), *others = found
        for place, other in others:
            if (other.format, other.turn_keys) != (first.format, first.turn_keys):
                raise ConfigError(
                    f"it holds {other.format} rows, but {first_place} holds {first.format} rows.",
                    place=place,
                    fix="load them as a mixture with weights, or map the columns with --columns.",
                )
        columns = dict(pair for _, layout in reversed(found) for pair in layout.columns)
        extras = tuple(role for role in ("answer", "tools") if role in columns)
        rich = any(layout.rich for _, layout in found)
        return replace(first, columns=tuple(columns.items()), extras=extras, rich=rich)

    @abstractmethod
    def check_first_rows(self, layout: Layout) -> None:
        """Raise an error if one of the first rows is bad, for files that consist of lines."""

    @abstractmethod
    def rows(self, layout: Layout, split: str, on_bad_row: str) -> tuple[Dataset, dict[str, int]]:
        """(all normalised rows of a split, skipped rows by reason), from the cache if they are there."""

    @abstractmethod
    def stream(self, layout: Layout, split: str, on_bad_row: str, log: SkipLog) -> IterableDataset:
        """The same rows read lazily; skipped ones go to `log`."""


def open_source(name: str, *, config: str | None, split: str, streaming: bool) -> Opened:
    """Find the source `name` and open its split `split`."""
    source = find_source(name, config=config)
    if source.kind == "files":
        return _Files(source, split)
    return _Library(source, split, streaming)


class _Files(Opened):
    def __init__(self, source: Source, split: str) -> None:
        super().__init__(source)
        self._sampled = source.files(split)

    @cached_property
    def _samples(self) -> list[tuple[str, Sample]]:
        step = -(-len(self._sampled) // _SAMPLED_FILES)
        return [(path, sample_rows(path)) for path in self._sampled[::step]]

    def check_first_rows(self, layout: Layout) -> None:
        for path, _ in self._samples:
            if file_kind(path) in ("jsonl", "csv"):
                policy = BadRowPolicy("error", SkipLog(os.devnull), count_others=False)
                with contextlib.suppress(RichTurnsFound):  # read again with whole turns
                    next(islice(file_rows(Span(path), layout.sampled(), policy), SAMPLE_ROWS, None), None)

    def rows(self, layout: Layout, split: str, on_bad_row: str) -> tuple[Dataset, dict[str, int]]:
        files = self.source.files(split)

        def tables(log: SkipLog) -> Iterator[pa.Table]:
            for path in files:
                yield from read_rows(Span(path), layout, BadRowPolicy(on_bad_row, log))

        return cached_rows(cache_key(files, layout, on_bad_row), layout.features(), tables)

    def stream(self, layout: Layout, split: str, on_bad_row: str, log: SkipLog) -> IterableDataset:
        from datasets import IterableDataset, NamedSplit

        spans = [span for path in self.source.files(split) for span in spans_of(path, span_bytes=SPAN_BYTES)]
        return IterableDataset.from_generator(
            _stream_examples,
            features=layout.features(),
            gen_kwargs={"spans": spans, "layout": layout, "on_bad_row": on_bad_row, "log": log},
            split=NamedSplit(canonical_split(split)),
        )


def _stream_examples(spans: list[Span], layout: Layout, on_bad_row: str, log: SkipLog) -> Iterator[dict[str, Any]]:
    for span in spans:
        policy = BadRowPolicy(on_bad_row, log, count_others=False)
        try:
            yield from file_rows(span, layout, policy)
        except RichTurnsFound:
            raise _rich_too_late(span.path) from None


def _rich_too_late(place: str) -> ConfigError:
    return ConfigError(
        f"turns with tool calls or reasoning come after {SAMPLE_ROWS} rows without, too late for a stream.",
        place=place,
        fix="put such a row among the first, or turn --dataset_streaming off.",
    )


class _Library(Opened):
    """A data set that the `datasets` library opens: from the hub, or saved with `save_to_disk`."""

    def __init__(self, source: Source, split: str, streaming: bool) -> None:
        super().__init__(source)
        self._streaming = streaming
        self._loaded: dict[str, Any] = {}
        self._first_split = split

    def _dataset(self, split: str) -> Any:
        if split not in self._loaded:
            load = _saved_split if self.source.kind == "saved" else _hub_split
            self._loaded[split] = load(self.source, split, self._streaming)
        return self._loaded[split]

    @cached_property
    def _samples(self) -> list[tuple[str, Sample]]:
        arrow = self._dataset(self._first_split).with_format("arrow")
        table = next(iter(arrow.iter(batch_size=SAMPLE_ROWS)), None)
        if table is None or not table.num_rows:
            raise ConfigError(f"{self.name} has no rows.", place="--dataset_name", fix="name another split.")
        return [(self.name, (table.column_names, table.to_pylist()))]

    def check_first_rows(self, layout: Layout) -> None:
        """Do nothing: data written by the library need no check."""

    def rows(self, layout: Layout, split: str, on_bad_row: str) -> tuple[Dataset, dict[str, int]]:
        dataset = self._dataset(split)
        files = [file["filename"] for file in dataset.cache_files]

        wanted = [column for _, column in layout.columns if column in dataset.column_names]

        def values() -> Iterator[Value]:
            tables = dataset.select_columns(wanted).with_format("arrow").iter(batch_size=ROWS_PER_BATCH)
            for number, value in enumerate((value for table in tables for value in table.to_pylist()), 1):
                yield number, value, None

        def tables(log: SkipLog) -> Iterator[pa.Table]:
            policy = BadRowPolicy(on_bad_row, log)
            yield from tables_of(usable_rows(values(), layout, policy, _row_place(self.name)), layout)
            policy.end_of_file()

        return cached_rows(cache_key(files, self.name, split, layout, on_bad_row), layout.features(), tables)

    def stream(self, layout: Layout, split: str, on_bad_row: str, log: SkipLog) -> IterableDataset:
        dataset = self._dataset(split)
        check = {"layout": layout, "name": self.name, "on_bad_row": on_bad_row, "log": log}
        return dataset.map(
            _checked_batch,
            batched=True,
            with_indices=True,
            remove_columns=self.column_names(),
            features=layout.features(),
            fn_kwargs=check,
        )


def _row_place(name: str) -> Callable[[int], str]:
    return lambda number: place_of(name, number, counts_lines=False)


def _checked_batch(
    batch: dict[str, list[Any]], indices: list[int], *, layout: Layout, name: str, on_bad_row: str, log: SkipLog
) -> dict[str, list[Any]]:
    """The function mapped over streams: returns good rows; bad ones are logged or raised."""
    values: Iterator[Value] = (
        (number + 1, {column: values[position] for column, values in batch.items()}, None)
        for position, number in enumerate(indices)
    )
    policy = BadRowPolicy(on_bad_row, log, count_others=False)
    try:
        examples = list(usable_rows(values, layout, policy, _row_place(name)))
    except RichTurnsFound:
        raise _rich_too_late(name) from None
    return {column: [example[column] for example in examples] for column in layout.features()}


def _saved_split(source: Source, split: str, streaming: bool) -> Any:
    from datasets import Dataset, load_from_disk

    try:
        loaded = load_from_disk(os.path.expanduser(source.name))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_whole(source.name, first_sentence(error)) from error
    splits = {"train": loaded} if isinstance(loaded, Dataset) else dict(loaded)
    if split not in splits:
        raise missing_split(source.name, split, list(splits))
    return splits[split].to_iterable_dataset() if streaming else splits[split]


def _hub_split(source: Source, split: str, streaming: bool) -> Any:
    """One split from the hub or its cache. No code from the repository is run: `datasets` 5 cannot."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        return load_dataset(source.name, source.config, split=split, streaming=streaming)
    except (DatasetNotFoundError, FileNotFoundError) as error:
        raise ConfigError(
            f"{source.name} is not in the current folder, and the hub has no such data set, or shows it to members "
            f"only ({first_sentence(error)}).",
            place="--dataset_name",
            fix="check the spelling, or log in with `hf auth login`.",
        ) from error
    except ConnectionError as error:
        raise ConfigError(
            f"{source.name} is not in the current folder, and the hub cannot be reached ({first_sentence(error)}).",
            place="--dataset_name",
            fix="check the network, or name a local file.",
        ) from error
    except ValueError as error:
        if unknown := _UNKNOWN_SPLIT.search(str(error)):
            raise missing_split(source.name, split, re.findall(r"'([^']+)'", unknown.group(1))) from error
        # For a missing or unknown configuration, `datasets` lists the existing ones, then shows an example.
        problem = " ".join(str(error).split()).split(" Example of usage")[0].rstrip(".")
        raise ConfigError(
            f"{source.name}: {problem}.", place="--dataset_config", fix="name a configuration it has."
        ) from error
