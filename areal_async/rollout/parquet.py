"""Rows of Parquet files as plain values.

What always holds: a row looks like the JSON object that it was made of. Columns of a table have one shape for all rows,
so writers fill in with null what a row doesn't have, at any depth; those keys are left out again. Lists arrive as
lists, maps as dicts. pyarrow is imported when a file is read, and never pandas or torch.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from areal_async.errors import DataError
from areal_async.rollout.values import Json

MAGIC: Final = b"PAR1"
ROWS_AT_A_TIME: Final = 1024  # as Python values: enough to be quick, little enough for long texts


def is_parquet(path: str) -> bool:
    """Whether the file begins as Parquet files do. Errors: DataError where it can't be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from error


def rows(path: str) -> Iterator[tuple[int, dict[str, Json]]]:
    """Number from 1 and values of each row, without those that are null. Errors: DataError that names the file."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_A_TIME):
                for row in batch.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield number, _without_nulls(row)
    except (arrow.ArrowException, OSError, KeyError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: not a Parquet file that can be read, after row {number}: {error}") from error


def count(path: str) -> int:
    """Rows of the file. Errors: DataError that names it."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            return int(file.metadata.num_rows)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file that can be read: {error}") from error


def row(path: str, number: int) -> dict[str, Json]:
    """The values of row `number`, from 0, without those that are null; only its part of the file is read. Errors:
    DataError that names the file."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    first = 0
    try:
        with parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                rows_in_it = file.metadata.row_group(group).num_rows
                if number < first + rows_in_it:
                    table = file.read_row_group(group, use_threads=False).slice(number - first, 1)
                    return _without_nulls(table.to_pylist(maps_as_pydicts="strict")[0])
                first += rows_in_it
    except (arrow.ArrowException, OSError, KeyError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: not a Parquet file that can be read, at row {number + 1}: {error}") from error
    raise DataError(f"{path}: there is no row {number + 1}")


def _without_nulls(row: dict[str, Json]) -> dict[str, Json]:
    return {key: _cleaned(value) for key, value in row.items() if value is not None}


def _cleaned(value: Json) -> Json:
    """A null in a list stays: it is an item, and leaving it out would move the others."""
    if isinstance(value, dict):
        return _without_nulls(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return value
