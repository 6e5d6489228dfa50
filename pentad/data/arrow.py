"""Rows of Parquet and Arrow files; the only place that imports pyarrow.

Arrow files (what HF `datasets` saves) are memory-mapped: any row is found at once and the file
costs no memory. Parquet is compressed by row groups of often thousands of rows: opened for
streaming, a few of them are kept unpacked, so shuffled access to a large file unpacks a group for
most rows. Where that is too slow, save the data as Arrow or JSON lines.
"""

from __future__ import annotations

import bisect
import datetime
import decimal
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pentad.core.errors import Problem, UserError
from pentad.data.stamp import Stamp, digest_of_file

ROW_GROUPS_KEPT = 8


class FileRows:
    """Rows of one file, numbered as they lie in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def digest(self) -> bytes:
        return digest_of_file(self.path)

    def where(self, index: int) -> str:
        return f"{self.path}:{index + 1}"


class TableRows(FileRows):
    """A table in memory or mapped from a file."""

    def __init__(self, path: Path, table: pa.Table, stamp: Stamp | None = None) -> None:
        super().__init__(path)
        self.stamp = stamp
        """Of a file that is mapped."""
        self.table = table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def row(self, index: int) -> dict[str, Any]:
        if self.stamp is not None:
            self.stamp.check()
        return row_of(self.table, index)


class ParquetRows(FileRows):
    """A Parquet file read by row groups as they are needed."""

    def __init__(self, path: Path, limit: int | None) -> None:
        super().__init__(path)
        self.stamp = Stamp(path)
        self.file = pq.ParquetFile(path)
        meta = self.file.metadata
        self.ends = list(accumulate(meta.row_group(i).num_rows for i in range(meta.num_row_groups)))
        self.size = meta.num_rows if limit is None else min(limit, meta.num_rows)
        self.group = lru_cache(maxsize=ROW_GROUPS_KEPT)(self.file.read_row_group)

    def __len__(self) -> int:
        return int(self.size)

    def row(self, index: int) -> dict[str, Any]:
        self.stamp.check()
        which = bisect.bisect_right(self.ends, index)
        return row_of(self.group(which), index - (self.ends[which - 1] if which else 0))


def open_table(
    path: Path,
    kind: Literal["parquet", "arrow"],
    where: str,
    *,
    streaming: bool,
    limit: int | None,
) -> TableRows | ParquetRows:
    try:
        rows: TableRows | ParquetRows
        if kind == "parquet" and streaming:
            rows = ParquetRows(path, limit)
            schema = rows.file.schema_arrow
        else:
            stamp = Stamp(path) if kind == "arrow" else None
            table = pq.read_table(path) if kind == "parquet" else read_arrow(path)
            rows = TableRows(path, table if limit is None else table.slice(0, limit), stamp)
            schema = table.schema
    except (pa.ArrowException, OSError) as error:
        raise UserError(Problem(where, f"{path} is not a whole {kind} file: {error}")) from error
    binary = [field.name for field in schema if holds_binary(field.type)]
    if binary:
        rule = f"column {binary[0]} of {path} holds bytes, and rows are text and numbers"
        raise UserError(Problem(where, rule, "save the data without it"))
    return rows


def read_arrow(path: Path) -> pa.Table:
    """The stream format, as HF `datasets` writes it, or the file format."""
    mapped = pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(mapped).read_all()
    except pa.ArrowInvalid:
        mapped.seek(0)
        return pa.ipc.open_file(mapped).read_all()


def row_of(table: pa.Table, index: int) -> dict[str, Any]:
    return {name: plain(table[name][index].as_py()) for name in table.column_names}


def plain(value: Any) -> Any:
    """Dates and decimals as text, so that a row can be written as JSON."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | decimal.Decimal):
        return str(value)
    return value


def holds_binary(kind: pa.DataType) -> bool:
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return True
    if pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind):
        return True
    return any(holds_binary(kind.field(i).type) for i in range(kind.num_fields))
