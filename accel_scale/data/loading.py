"""Load a run's data: one source or a mixture, local or from the hub, memory-mapped or streamed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from accel_scale.data.bad_rows import SkipLog, check_on_bad_row
from accel_scale.data.columns import parse_columns
from accel_scale.data.layout import Layout
from accel_scale.data.mixture import MixtureItem, common_layouts, mix, parse_mixture, shares
from accel_scale.data.rows import RichTurnsFound
from accel_scale.data.sources import MissingSplit, check_saved, find_source
from accel_scale.errors import ConfigError
from accel_scale.facts.names import RowsWith

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from accel_scale.data.opened import Opened

SHUFFLE_BUFFER_ROWS = 10_000


@dataclass(frozen=True)
class LoadedData:
    """Rows ready for TRL.

    Args:
        train, test: Data sets with TRL's columns (`messages`, or `prompt` and `completion`, or `text`, or those of
            preferences), plus `answer` and `tools` where the source has them. `IterableDataset`s when streaming.
        format: TRL's format, see `Layout.target`.
        conversational: Whether rows are turns, which need a chat template (see `ensure_chat_template`).
        source_formats: Format found in each source: ``messages``, ``sharegpt``, ``alpaca``, …
        sources: The sources as they were named.
        num_rows: Rows in `train`; None when streaming.
    """

    train: Dataset | IterableDataset
    test: Dataset | IterableDataset | None
    format: str
    conversational: bool
    source_formats: tuple[str, ...]
    sources: tuple[str, ...]
    num_rows: int | None
    _skipped: Mapping[str, int] = field(default_factory=dict, repr=False)
    _log: SkipLog | None = field(default=None, repr=False)

    @property
    def skipped_reasons(self) -> dict[str, int]:
        """Number of skipped rows by reason; when streaming, of those this machine has seen so far."""
        return self._log.reasons() if self._log else dict(self._skipped)

    @property
    def skipped_rows(self) -> int:
        """Number of skipped rows, see `skipped_reasons`."""
        return sum(self.skipped_reasons.values())

    def with_test(self, test: Dataset | IterableDataset | None) -> LoadedData:
        """The same data with other test rows."""
        return replace(self, test=test)


def load_training_data(
    source: str | None = None,
    *,
    config: str | None = None,
    split: str = "train",
    test_split: str | None = None,
    columns: Sequence[str] | Mapping[str, str] = (),
    on_bad_row: str = "error",
    streaming: bool = False,
    mixture: Sequence[str] = (),
    seed: int = 42,
    chat: bool = True,
    rows_with: RowsWith | None = None,
    shuffle_buffer_rows: int = SHUFFLE_BUFFER_ROWS,
) -> LoadedData:
    """Find, read, check and normalise training data.

    Every process of a launch may call it: the first to come writes the cache, the others wait and map it.
    Formats and columns are detected from the first 1000 rows of up to eight files; rows that differ are bad rows.

    Args:
        source: A hub id, a local file, a folder, a glob, or a `datasets.save_to_disk` folder.
        config: Hub configuration name.
        split, test_split: Split names, also with slices (``train[:95%]``) and sums (``train+validation``);
            `test_split` None loads no test rows. In folders, splits are recognised by file and folder names.
        columns: ``role=column`` items, see `accel_scale.data.layout.ROLES`. In a mixture they apply to the
            sources that have all these columns.
        on_bad_row: ``error`` stops at the first bad row and names its file and line; ``skip`` counts them.
        streaming: Read lazily. `train` is then shuffled within a buffer of `shuffle_buffer_rows` rows.
        mixture: ``source=weight`` items instead of `source`; see `accel_scale.data.mixture.mix`.
        seed: For shuffles and draws; ranks that share it see the same order.
        chat: Whether the model has a chat template: alpaca rows become turns, otherwise Alpaca's prompt text.
        rows_with: Rows are ``pairs`` of a better and a worse answer (`chosen` and `rejected`), or have ``labels``.

    Raises:
        ConfigError: for any problem with the data that the user must fix; the message says where and how.
    """
    check_on_bad_row(on_bad_row)
    items = _items(source, config, mixture)
    opened = _open(items, split, streaming=streaming)
    layouts = _layouts(opened, parse_columns(columns), chat=chat, rows_with=rows_with)
    try:
        return _load(opened, layouts, items, split, test_split, on_bad_row, streaming, seed, shuffle_buffer_rows)
    except RichTurnsFound:
        # Tool calls after the rows that the layout was detected from: read again, keeping whole turns as JSON.
        layouts = [replace(layout, rich=True) for layout in layouts]
        return _load(opened, layouts, items, split, test_split, on_bad_row, streaming, seed, shuffle_buffer_rows)


def check_local_data(
    source: str | None,
    *,
    split: str = "train",
    test_split: str | None = None,
    columns: Sequence[str] | Mapping[str, str] = (),
    mixture: Sequence[str] = (),
    rows_with: RowsWith | None = None,
    on_bad_row: str = "error",
) -> list[Layout]:
    """Refuse local files whose splits, columns or first rows cannot be trained on, as `load_training_data` would.

    Reads at most the first 1000 rows of up to eight files and imports no slow library. Data on the hub are left to
    `load_training_data`; folders of `save_to_disk` are only checked for missing files.

    Returns:
        The sources' layouts for a model with a chat template; empty if any of them does not consist of files.

    Raises:
        ConfigError: as `load_training_data`.
    """
    items = _items(source, None, mixture)
    sources = [find_source(item.name) for item in items]
    for found in sources:
        if found.kind == "saved":
            check_saved(found.name)
    if not all(found.kind == "files" for found in sources):
        return []
    opened = _open(items, split, streaming=False)
    layouts = _layouts(opened, parse_columns(columns), chat=True, rows_with=rows_with)
    if test_split is not None:
        _require_split(opened, test_split)
    for place, layout in zip(opened, layouts, strict=True):
        if on_bad_row == "error":
            place.check_first_rows(layout)
    return layouts


def _require_split(opened: Sequence[Opened], spec: str) -> None:
    """Raise MissingSplit if no source has the first split of `spec`; one source of a mixture is enough."""
    missing: MissingSplit | None = None
    for source in opened:
        try:
            source.source.files(_split_names(spec)[0])
            return
        except MissingSplit as error:
            missing = error
    assert missing is not None
    raise missing


def _items(source: str | None, config: str | None, mixture: Sequence[str]) -> list[MixtureItem]:
    if bool(source) == bool(mixture):
        raise ConfigError(
            "a source and a mixture were both given." if source else "no data set was named.",
            place="--dataset_name / --dataset_mixture",
            fix="give one of the two.",
        )
    return parse_mixture(mixture) if mixture else [MixtureItem(str(source), 1.0, config)]


def _open(items: Sequence[MixtureItem], split: str, *, streaming: bool) -> list[Opened]:
    from accel_scale.data.opened import open_source

    first = _split_names(split)[0]
    return [open_source(item.name, config=item.config, split=first, streaming=streaming) for item in items]


def _layouts(
    opened: Sequence[Opened], mapping: dict[str, str], *, chat: bool, rows_with: RowsWith | None
) -> list[Layout]:
    layouts = []
    mapped_any = False
    for source in opened:
        own = mapping if set(mapping.values()) <= set(source.column_names()) else {}
        mapped_any = mapped_any or bool(own)
        # Only one source of a mixture need have the mapped columns; a source on its own must.
        layouts.append(source.layout(own if len(opened) > 1 else mapping, chat=chat, rows_with=rows_with))
    if mapping and not mapped_any:
        raise ConfigError(
            f"no source of the mixture has all the columns {', '.join(mapping.values())}.",
            place="--columns",
            fix="check their names.",
        )
    return common_layouts([source.name for source in opened], layouts)


def _load(
    opened: Sequence[Opened],
    layouts: Sequence[Layout],
    items: Sequence[MixtureItem],
    split: str,
    test_split: str | None,
    on_bad_row: str,
    streaming: bool,
    seed: int,
    shuffle_buffer_rows: int,
) -> LoadedData:
    log = SkipLog.temporary() if streaming else None
    skipped: Counter[str] = Counter()

    def rows(source: Opened, layout: Layout, spec: str) -> Any:
        dataset, reasons = _split_rows(source, layout, spec, on_bad_row, log)
        skipped.update(reasons)
        return dataset

    train = mix(
        [rows(source, layout, split) for source, layout in zip(opened, layouts, strict=True)],
        shares(items),
        seed=seed,
    )
    if streaming:
        train = train.shuffle(seed=seed, buffer_size=shuffle_buffer_rows)
    elif not len(train):
        raise ConfigError(
            f"no row of {', '.join(source.name for source in opened)} can be used.",
            place="--dataset_name",
            fix="look at the reasons with --on_bad_row error.",
        )
    test = None
    if test_split is not None:
        test = _test_rows([(source, layout, rows) for source, layout in zip(opened, layouts, strict=True)], test_split)
    return LoadedData(
        train=train,
        test=test,
        format=layouts[0].target,
        conversational=layouts[0].conversational,
        source_formats=tuple(layout.format for layout in layouts),
        sources=tuple(source.name for source in opened),
        num_rows=None if streaming else len(train),
        _skipped=dict(skipped.most_common()),
        _log=log,
    )


def _test_rows(parts: Sequence[tuple[Any, Layout, Any]], test_split: str) -> object:
    """The test rows of every source that has some, one after another."""
    from datasets import concatenate_datasets

    found, missing = [], None
    for source, layout, rows in parts:
        try:
            found.append(rows(source, layout, test_split))
        except MissingSplit as error:
            missing = error
    if not found:
        assert missing is not None
        raise missing
    return found[0] if len(found) == 1 else concatenate_datasets(found)


def _split_names(spec: str) -> list[str]:
    """``train[:10%]+validation`` → ``["train", "validation"]``."""
    return [part.split("[")[0].strip() for part in re.split(r"\+", spec)]


def _split_rows(
    source: Opened, layout: Layout, spec: str, on_bad_row: str, log: SkipLog | None
) -> tuple[Any, dict[str, int]]:
    """The rows of ``name``, ``name[slice]`` or a sum of these, and the skipped ones by reason."""
    from datasets import ReadInstruction, concatenate_datasets

    names = list(dict.fromkeys(_split_names(spec)))
    if log is not None:
        if "[" in spec:
            raise ConfigError(
                f"a stream has no length, so {spec!r} cannot be cut from it.",
                place="--dataset_train_split / --dataset_test_split",
                fix="name whole splits, or turn --dataset_streaming off.",
            )
        streams = [source.stream(layout, name, on_bad_row, log) for name in names]
        return (streams[0] if len(streams) == 1 else concatenate_datasets(streams)), {}
    loaded = {name: source.rows(layout, name, on_bad_row) for name in names}
    reasons: Counter[str] = Counter()
    for _, skipped in loaded.values():
        reasons.update(skipped)
    if spec in loaded:
        return loaded[spec][0], reasons
    lengths = {name: len(dataset) for name, (dataset, _) in loaded.items()}
    try:
        parts = ReadInstruction.from_spec(spec).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"{spec!r} is not a split: {error}.",
            place="--dataset_train_split / --dataset_test_split",
            fix="write e.g. train, train[:95%] or train[1000:2000].",
        ) from error
    cut = [loaded[part.splitname][0].select(range(part.from_, part.to)) for part in parts]
    return (cut[0] if len(cut) == 1 else concatenate_datasets(cut)), reasons
