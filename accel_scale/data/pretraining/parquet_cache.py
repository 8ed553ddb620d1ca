"""Parquet files with large row groups, converted once to Arrow files, whose rows can be read in any order."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from accel_scale.data.cache import complete_folder, files_digest
from accel_scale.data.pretraining.tables import parquet_metadata
from accel_scale.disk_space import OUT_OF_SPACE
from accel_scale.errors import ConfigError

_AREA, _VERSION = "accel_scale_pretraining", 1
_BATCH_ROWS = 8192


def converted_parquet(name: str, paths: Sequence[str], text_column: str) -> tuple[str, ...]:
    """Arrow files with the text of Parquet files, in the same order of rows; from `datasets`' cache if they are there.

    Needs memory for a few thousand rows only.
    """
    key = files_digest(f"{_VERSION}\0{text_column}".encode(), paths).hexdigest()[:32]
    try:
        folder = complete_folder(_AREA, key, lambda unfinished: _convert(name, paths, text_column, unfinished))
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        raise ConfigError(
            f"the disk of the cache is full: {name} needs as much space there as its text is long.",
            place="HF_DATASETS_CACHE",
            fix="free space, or set the variable to a folder on a larger disk.",
        ) from error
    return tuple(str(folder / f"{index:05d}.arrow") for index in range(len(paths)))


def _convert(name: str, paths: Sequence[str], text_column: str, folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tqdm import tqdm

    total = sum(parquet_metadata(path, text_column).num_rows for path in paths)
    speaks = os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()
    schema = pa.schema([(text_column, pa.large_string())])
    with tqdm(total=total, unit=" rows", desc=f"converting {name}", disable=not speaks, file=sys.stderr) as bar:
        for index, path in enumerate(paths):
            with contextlib.ExitStack() as stack:
                # Buffered, with page-wise decoding: a row group of a gigabyte is never in memory as a whole.
                file = stack.enter_context(pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20))
                sink = stack.enter_context(pa.OSFile(str(folder / f"{index:05d}.arrow"), "wb"))
                writer = stack.enter_context(pa.ipc.new_file(sink, schema))
                for batch in file.iter_batches(_BATCH_ROWS, columns=[text_column], use_threads=False):
                    writer.write_batch(pa.record_batch([batch.column(0).cast(pa.large_string())], schema=schema))
                    bar.update(batch.num_rows)
