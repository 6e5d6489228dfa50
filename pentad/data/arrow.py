"""Rows of Parquet and Arrow files; the only place that imports pyarrow.

Arrow files (the format of HF `datasets`) are memory-mapped: access is random and uses no memory.
Parquet is compressed in row groups of often thousands of rows. When streaming, only a few are kept
decompressed, so shuffled access to a large file decompresses a group for most rows. If that is too
slow, save the data as Arrow or JSON lines.
"""

from __future__ import annotations

import bisect
import datetime
import decimal
import threading
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pentad.core.errors import Problem, UserError
from pentad.core.files import file_digest
from pentad.core.folders import MAX_ROW_BYTES
from pentad.core.machine import host_memory
from pentad.data.stamp import Stamp

ROW_GROUPS_KEPT = 8
GIB = 1 << 30
VALUE_BYTES = 16
"""Size of the widest fixed-width value, in bytes."""


class FileRows:
    """Rows of one file, numbered in file order."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def digest(self) -> bytes:
        return file_digest(self.path)

    def where(self, index: int) -> str:
        return f"{self.path}:{index + 1}"

    def _row(self, table: pa.Table, at: int, index: int) -> dict[str, Any]:
        row = {name: plain(table[name][at].as_py()) for name in table.column_names}
        if num_characters(row) > MAX_ROW_BYTES:
            rule = f"the row holds more than {MAX_ROW_BYTES >> 20} MiB of text"
            raise UserError(Problem(self.where(index), rule, "split the row"))
        return row


class TableRows(FileRows):
    """A table in memory or mapped from a file."""

    def __init__(self, path: Path, table: pa.Table, stamp: Stamp | None = None) -> None:
        super().__init__(path)
        self.stamp = stamp
        """Only set for a mapped file."""
        self.table = table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def row(self, index: int) -> dict[str, Any]:
        if self.stamp is not None:
            self.stamp.check()
        return self._row(self.table, index, index)


class RowGroupCache:
    """Decompressed row groups of streamed files, evicted by least recent use: at most
    ROW_GROUPS_KEPT of a file, and half of the available memory for all files."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tables: dict[tuple[Path, int], tuple[pa.Table, int]] = {}

    def get(self, path: Path, file: pq.ParquetFile, which: int) -> pa.Table:
        key = path, which
        with self.lock:
            found = self.tables.pop(key, None)
            if found is not None:
                self.tables[key] = found  # the newest is last
                return found[0]
            size = unpacked_bytes(file, [which])
            self._make_room(path, size)
        table = file.read_row_group(which)
        with self.lock:
            self.tables[key] = table, size
        return table

    def _make_room(self, path: Path, size: int) -> None:
        held = sum(size for _, size in self.tables.values())
        limit = (host_memory()[1] + held) // 2
        check_room(path, size, limit)
        own = [key for key in self.tables if key[0] == path]
        for key in own[: max(0, len(own) + 1 - ROW_GROUPS_KEPT)]:
            held -= self.tables.pop(key)[1]
        while self.tables and held + size > limit:
            held -= self.tables.pop(next(iter(self.tables)))[1]

    def forget(self, path: Path) -> None:
        with self.lock:
            for key in [key for key in self.tables if key[0] == path]:
                del self.tables[key]


row_groups = RowGroupCache()


class ParquetRows(FileRows):
    """A Parquet file whose row groups are read as needed."""

    def __init__(self, path: Path, limit: int | None) -> None:
        super().__init__(path)
        self.stamp = Stamp(path)
        self.file = open_parquet(path)
        row_groups.forget(path)  # of an earlier file with this name
        meta = self.file.metadata
        self.ends = list(accumulate(meta.row_group(i).num_rows for i in range(meta.num_row_groups)))
        self.size = meta.num_rows if limit is None else min(limit, meta.num_rows)

    def __len__(self) -> int:
        return int(self.size)

    def row(self, index: int) -> dict[str, Any]:
        self.stamp.check()
        which = bisect.bisect_right(self.ends, index)
        begin = self.ends[which - 1] if which else 0
        return self._row(row_groups.get(self.path, self.file, which), index - begin, index)


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
            table = read_parquet(path) if kind == "parquet" else read_arrow(path)
            rows = TableRows(path, table if limit is None else table.slice(0, limit), stamp)
            schema = table.schema
    except (pa.ArrowException, OSError) as error:
        raise UserError(Problem(where, f"{path} is not a whole {kind} file: {error}")) from error
    binary = [field.name for field in schema if holds_binary(field.type)]
    if binary:
        rule = f"column {binary[0]} of {path} holds bytes, and rows are text and numbers"
        raise UserError(Problem(where, rule, "save the data without it"))
    return rows


def open_parquet(path: Path) -> pq.ParquetFile:
    """Opens a Parquet file. Dictionary-encoded texts stay encoded, so that repeated texts are in
    memory once."""
    meta = pq.read_metadata(path)
    columns = [meta.schema.column(i) for i in range(meta.num_columns)]
    texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    return pq.ParquetFile(path, read_dictionary=texts)


def read_parquet(path: Path) -> pa.Table:
    file = open_parquet(path)
    groups = range(file.metadata.num_row_groups)
    check_room(path, unpacked_bytes(file, groups), host_memory()[1] // 2)
    tables = [file.read_row_group(group) for group in groups]
    return pa.concat_tables(tables) if tables else file.schema_arrow.empty_table()


def check_room(path: Path, size: int, limit: int) -> None:
    if size > limit:
        free = f"{limit / GIB:.1f} GiB are free for it"
        rule = f"it takes up to {size / GIB:.1f} GiB of memory, and {free}"
        remedy = "save it as JSON lines or Arrow, or in smaller row groups and set streaming"
        raise UserError(Problem(str(path), rule, remedy))


def unpacked_bytes(file: pq.ParquetFile, groups: Sequence[int]) -> int:
    """Decompressed size of row groups, from the file's column metadata."""
    meta = file.metadata
    columns = range(meta.num_columns)
    return sum(_column_bytes(meta.row_group(group).column(i)) for group in groups for i in columns)


def _column_bytes(column: pq.ColumnChunkMetaData) -> int:
    """Upper bound of a column's decompressed size: its values, and one number or index for each."""
    return int(column.total_uncompressed_size + VALUE_BYTES * column.num_values)


def read_arrow(path: Path) -> pa.Table:
    """Reads the stream format, which HF `datasets` writes, or the file format."""
    mapped = pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(mapped).read_all()
    except pa.ArrowInvalid:
        mapped.seek(0)
        return pa.ipc.open_file(mapped).read_all()


def plain(value: Any) -> Any:
    """Converts dates and decimals to text, so that a row can be written as JSON."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | decimal.Decimal):
        return str(value)
    return value


def num_characters(value: Any) -> int:
    """Number of characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(num_characters, inner))


def holds_binary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return True
    if pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind):
        return True
    return any(holds_binary(kind.field(i).type) for i in range(kind.num_fields))
