"""Token shards: memory-mapped files of ids, and texts that are tokenised to such a file.

A shard is a `.npy` file with a one-dimensional integer array, or Megatron's `.bin` with its `.idx`.
JSON lines, Parquet, saved HF datasets and plain texts (`.txt`, `.md`: one document each) are
tokenised once, into a `.npy` named by a digest of texts and tokenizer, which later starts reuse.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pentad.core.errors import Problem, UserError
from pentad.core.files import file_digest
from pentad.core.folders import open_file
from pentad.core.machine import host_memory
from pentad.data.render import BadRow, DataSource, text_of
from pentad.data.rows import STREAMS, SUFFIXES, DatasetRows, FileKind, find_files, raise_first
from pentad.data.stamp import Stamp
from pentad.data.tokenizer import Tokenizer

KINDS: dict[str, FileKind] = SUFFIXES | STREAMS
INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Header of an .idx: magic, version, code of the number type, sequences, documents."""
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
DOCUMENTS_AT_ONCE = 1024
BLOCK = 1 << 20
MAX_BLOCKS = 64
"""Number of evenly spaced blocks of ids that are checked when a shard is opened."""


@dataclass(frozen=True, slots=True)
class TokenShard:
    path: Path
    ids: np.ndarray
    """One-dimensional, memory-mapped."""
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Survey:
    """Result of checking blocks of a shard."""

    digest: bytes
    ends: int
    """Number of end-of-document ids in them."""


class TextFiles:
    """Plain-text files as rows with one column."""

    def __init__(self, files: Sequence[Path], column: str) -> None:
        self.files = files
        self.column = column
        self.stamps = [Stamp(file) for file in files]

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(b"".join(map(file_digest, self.files))).digest()

    def __len__(self) -> int:
        return len(self.files)

    def row(self, index: int) -> dict[str, Any]:
        size, most = self.files[index].stat().st_size, host_memory()[1] // 2
        if size > most:
            rule = f"has {size:,} bytes of text, and half of the available memory is {most:,}"
            raise UserError(Problem(self.where(index), rule, "split it into several files"))
        try:
            text = self.files[index].read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            rule = f"not UTF-8 (byte {error.start})"
            raise UserError(Problem(self.where(index), rule)) from error
        self.stamps[index].check()
        return {self.column: text}

    def where(self, index: int) -> str:
        return str(self.files[index])


def find_data(source: DataSource) -> tuple[FileKind, list[Path]]:
    """The files to pretrain on, all of one kind. Texts in a folder of rows, such as a README.md,
    are ignored."""
    where = f"{source.key}.path = {source.path}"
    root = Path(source.path).expanduser()
    has_rows = root.is_dir() and any(file.suffix in SUFFIXES for file in root.rglob("*"))
    wanted = {end: kind for end, kind in KINDS.items() if kind != "text" or not has_rows}
    found = find_files(source.path, source.data.format, where, wanted)
    kinds = sorted({kind for _, kind in found})
    if len(kinds) > 1:
        raise UserError(Problem(where, f"files of several kinds: {', '.join(kinds)}"))
    return kinds[0], [file for file, _ in found]


def open_texts(
    source: DataSource, kind: FileKind, files: list[Path], tokenizer: Tokenizer, cache: Path
) -> TokenShard:
    """Tokenises texts to a shard in the folder `cache`, or reuses it."""
    column = source.data.text_key or "text"
    rows: DatasetRows = (
        TextFiles(files[: source.limit], column) if kind == "text" else source.open(streaming=True)
    )
    return open_shard(tokenise(rows, column, source, tokenizer, cache))


def open_shard(path: Path) -> TokenShard:
    where = f"token shard = {path}"
    try:
        stamp = Stamp(path)
        ids = map_indexed(path) if path.suffix == ".bin" else np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError, struct.error) as error:
        raise UserError(Problem(where, f"cannot be read: {reason_of(error)}")) from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        rule = f"holds {ids.dtype} of shape {list(ids.shape)}, not one row of integers"
        raise UserError(Problem(where, rule, "write it with numpy.save, such as uint16 or uint32"))
    return TokenShard(path, ids, stamp)


def reason_of(error: Exception) -> str:
    """First line of an error; errors of Arrow have no `strerror`."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return said.splitlines()[0]


def map_indexed(path: Path) -> np.ndarray:
    """Maps the ids of a .bin file, whose .idx contains their type."""
    index, where = path.with_suffix(".idx"), f"token shard = {path}"
    if not index.exists():
        rule = f"there is no {index.name} beside it, which contains the type of its numbers"
        raise UserError(Problem(where, rule, "copy it there, or write the ids with numpy.save"))
    with open_file(index) as file:
        magic, version, code, sequences, _ = INDEX_HEADER.unpack(file.read(INDEX_HEADER.size))
    if magic != INDEX_MAGIC or version != 1 or code not in INDEX_TYPES:
        rule = f"{index.name} is not an index of Megatron that this version reads"
        raise UserError(Problem(where, rule, "write the ids with numpy.save"))
    lengths = np.memmap(index, np.int32, "r", offset=INDEX_HEADER.size, shape=(sequences,))
    ids = np.memmap(path, INDEX_TYPES[code], "r")
    if (known := int(lengths.sum(dtype=np.int64))) != len(ids):
        rule = f"has {len(ids)} numbers, and {index.name} counts {known}"
        raise UserError(Problem(where, rule, "one of the two is incomplete: copy them again"))
    return ids


def survey(shard: TokenShard, eos_id: int, vocab_size: int) -> Survey:
    """Checks a shard; raises UserError if an id is outside the model's vocabulary. In a large shard
    only some blocks are checked, the others when they are trained."""
    digest, ends, total = hashlib.blake2b(digest_size=16), 0, len(shard.ids)
    digest.update(f"{shard.ids.dtype} {total}".encode())
    num = min(MAX_BLOCKS, -(-total // BLOCK))
    for start in np.linspace(0, max(total - BLOCK, 0), num, dtype=np.int64):
        block = np.asarray(shard.ids[start : start + BLOCK])
        digest.update(block.tobytes())
        ends += int((block == eos_id).sum())
        check_ids(shard, block, int(start), vocab_size)
    return Survey(digest.digest(), ends)


def check_ids(shard: TokenShard, ids: np.ndarray, start: int, vocab_size: int) -> None:
    """Raises UserError if one of these ids, at offset `start` of the shard, is outside the model's
    vocabulary."""
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        rule = f"id {ids[at]} at place {start + at}: the model's ids are 0 to {vocab_size - 1}"
        remedy = "tokenise with the tokenizer of actor.path"
        raise UserError(Problem(f"token shard = {shard.path}", rule, remedy))


def tokenise(
    rows: DatasetRows, column: str, source: DataSource, tokenizer: Tokenizer, cache: Path
) -> Path:
    """The path of the shard of these texts, which is written if it does not exist."""
    ids = tokenizer.prefix_ids, tokenizer.eos_id, tokenizer.vocab_size
    marks = column, len(rows), *ids  # a table's digest ignores the limit
    where = f"{source.key}.path = {source.path}"
    try:
        known = rows.digest + tokenizer.digest + repr(marks).encode()
    except OSError as error:
        rule = f"{error.filename} cannot be read: {reason_of(error)}"
        raise UserError(Problem(where, rule)) from error
    digest = hashlib.blake2b(known, digest_size=16)
    target = cache / f"{digest.hexdigest()}.npy"
    if target.exists():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another run may be writing it
            if not target.exists():
                try:
                    write_shard(file, documents(rows, column, source, tokenizer), tokenizer)
                except BaseException:
                    file.truncate(0)
                    raise
                part.rename(target)
    except OSError as error:
        remedy = "set fileroot to a folder with room" if error.errno in NO_ROOM else ""
        rule = f"its tokens go to {cache}: {reason_of(error)}"
        raise UserError(Problem(where, rule, remedy)) from error
    return target


def documents(
    rows: DatasetRows, column: str, source: DataSource, tokenizer: Tokenizer
) -> Iterator[list[int]]:
    """Yields the ids of each text, with the model's prefix and the end-of-document id unless the
    text has them. After all rows are read, raises UserError with all broken ones."""
    problems: list[Problem | str] = []
    counts: Counter[str] = Counter()
    prefix = tokenizer.prefix_ids
    for start in range(0, len(rows), DOCUMENTS_AT_ONCE):
        texts = []
        for index in range(start, min(start + DOCUMENTS_AT_ONCE, len(rows))):
            try:
                text = text_of(rows.row(index), column, source)
                counts["empty"] += not text
                texts += [text] if text else []
            except BadRow as error:
                problems.append(error.at(rows.where(index)))
            except UserError as error:
                problems += error.problems
            except OSError as error:
                rule = f"cannot be read: {reason_of(error)}"
                problems.append(Problem(rows.where(index), rule))
        for ids in tokenizer.encode_all([] if problems else texts):
            end = [] if ids and ids[-1] == tokenizer.eos_id else [tokenizer.eos_id]
            is_begun = tuple(ids[: len(prefix)]) == prefix
            yield [*(() if is_begun else prefix), *ids, *end]
    raise_first(problems)
    if counts["empty"] == len(rows) and not source.is_cut(len(rows)):
        where = f"{source.key}.path = {source.path}"
        raise UserError(Problem(where, f'"{column}" is empty in all {len(rows)} rows'))


def write_shard(file: Any, found: Iterator[list[int]], tokenizer: Tokenizer) -> None:
    """Writes a .npy file. Its length, known only at the end, is written into reserved header
    space."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    header = {"descr": dtype.str, "fortran_order": False, "shape": (0,)}
    file.truncate(0)
    np.lib.format.write_array_header_1_0(file, header)
    begin, total = file.tell(), 0
    for ids in found:
        total += file.write(np.array(ids, dtype).tobytes())
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, header | {"shape": (total // dtype.itemsize,)})
    assert file.tell() == begin, "numpy keeps the size of a header"
    file.flush()
    os.fsync(file.fileno())
