"""Token streams: from shards and texts to sequences, every token predicted once."""

import errno
import json
import os
import struct
from dataclasses import replace

import numpy as np
import pytest
from sections import data_source

from pentad.core.errors import RunError, UserError
from pentad.data import shards
from pentad.data.tokenizer import load_tokenizer
from pentad.data.tokens import TokenSequences, open_tokens
from pentad.data.toy import write_byte_model

VOCAB = 259
LENGTH = 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_byte_model(folder)
    return load_tokenizer(folder)


@pytest.fixture
def opened(tokenizer, tmp_path):
    def open_one(path, **changes):
        given = {"max_length": LENGTH, "shuffle": False} | changes
        data = data_source(path=str(path), **given)
        return open_tokens(data, tokenizer, VOCAB, tmp_path / "tokens")

    return open_one


def said(call) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def write_lines(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_indexed(path, ids, lengths=None, code=8, dtype=np.uint16):
    """As Megatron-Core's IndexedDatasetBuilder: magic, version, type, counts, lengths, pointers,
    documents."""
    lengths = np.array([len(ids)] if lengths is None else lengths, np.int32)
    starts = (
        np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) * np.dtype(dtype).itemsize
    )
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(lengths) + 1)
    tables = (lengths, starts, np.arange(len(lengths) + 1, dtype=np.int64))
    path.write_bytes(np.array(ids, dtype).tobytes())
    path.with_suffix(".idx").write_bytes(header + b"".join(t.tobytes() for t in tables))
    return path


def trained(data, epoch=0):
    """(context, token) of every prediction of an epoch, in the order of the stream."""
    found = []
    for row in data.batch(epoch, len(data)):
        ids, weights = row.ids.tolist(), row.columns["weights"].tolist()
        assert weights == [0.0] + [1.0] * (len(ids) - 1) and row.count == len(ids) - 1
        found += zip(ids[:-1], ids[1:], strict=True)
    return found


def test_every_token_after_the_first_is_predicted_once(opened, tmp_path):
    ids = np.arange(1, 3 * (LENGTH - 1) + 5, dtype=np.uint16) + 3
    np.save(tmp_path / "a.npy", ids)
    data = opened(tmp_path / "a.npy", mask_documents=False)
    assert len(data) == 3 and data.max_row_tokens == LENGTH
    assert {len(row.ids) for row in data.batch(0, 3)} == {LENGTH}
    used = ids[: 3 * (LENGTH - 1) + 1].tolist()
    assert trained(data) == list(zip(used[:-1], used[1:], strict=True))
    assert data.summary().endswith("25 tokens, 3 sequences of 8, 3 tokens left over")


def test_masked_documents_are_rows_of_their_own(opened, tokenizer, tmp_path):
    texts = ["ab", "cde", "", "f", "ghijklmnop"]
    data = opened(write_lines(tmp_path / "a.jsonl", *texts))
    end = tokenizer.eos_id
    stream = [i for text in filter(None, texts) for i in [*tokenizer.encode(text), end]]
    stream = stream[: len(data) * (LENGTH - 1) + 1]
    pairs = [pair for pair in zip(stream[:-1], stream[1:], strict=True) if pair[0] != end]
    assert trained(data) == pairs, "no token is predicted from another document's"
    open_pairs = trained(opened(tmp_path / "a.jsonl", mask_documents=False))
    assert open_pairs == list(zip(stream[:-1], stream[1:], strict=True))


def test_shards_of_all_kinds_hold_the_same_stream(opened, tokenizer, tmp_path):
    texts = ["the first text", "another", "and the last of them"]
    want = opened(write_lines(tmp_path / "a.jsonl", *texts))
    ids = np.array([i for t in texts for i in [*tokenizer.encode(t), tokenizer.eos_id]])
    (tmp_path / "npy").mkdir(), (tmp_path / "txt").mkdir()
    np.save(tmp_path / "npy" / "0.npy", ids[:11].astype(np.int64))  # sequences span shards
    np.save(tmp_path / "npy" / "1.npy", ids[11:].astype(np.uint32))
    lengths = [len(t) + 1 for t in texts]
    write_indexed(tmp_path / "m.bin", ids, lengths)
    write_indexed(tmp_path / "n.bin", ids, code=4, dtype=np.int32)
    for number, text in enumerate(texts):
        (tmp_path / "txt" / f"{number}.txt").write_text(text)
    np.save(tmp_path / "b.npy", ids)
    for path in ("npy", "txt", "m.bin", "n.bin", "[b].npy"):
        data = opened(tmp_path / path)
        assert trained(data) == trained(want), path
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    assert trained(opened(other, text_key="body")) == trained(want)


def test_texts_are_tokenised_once_and_again_when_they_change(
    opened, tokenizer, tmp_path, monkeypatch
):
    path = write_lines(tmp_path / "a.jsonl", "some text", "more text")
    state = opened(path).state()
    (shard,) = (tmp_path / "tokens").glob("*.npy")
    monkeypatch.setattr(type(tokenizer), "encode_all", None)  # not asked
    assert opened(path).state() == state
    monkeypatch.undo()
    write_lines(path, "some text", "more texts")
    assert opened(path).state()["tokens"] != state["tokens"]
    assert len(list((tmp_path / "tokens").glob("*.npy"))) == 2 and shard.exists()
    assert not list((tmp_path / "tokens").glob("*.part"))


def test_the_order_follows_from_seed_and_epoch(opened, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(200, dtype=np.uint8))
    data = opened(tmp_path / "a.npy", shuffle=True, seed=3)
    first, second = trained(data), trained(data, epoch=1)
    assert first != second and sorted(first) == sorted(second)
    again = opened(tmp_path / "a.npy", shuffle=True, seed=3)
    size, steps = 4, len(data) // 4
    cut = [row.ids.tolist() for step in range(steps) for row in again.batch(step, size)]
    assert cut == [row.ids.tolist() for row in data.batch(0, steps * size)]


def test_a_limit_counts_rows_of_texts_and_sequences_of_shards(opened, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(200, dtype=np.uint8))
    assert len(opened(tmp_path / "a.npy", limit=5)) == 5
    write_lines(tmp_path / "a.jsonl", "x" * 20, "y" * 20)
    assert len(opened(tmp_path / "a.jsonl", limit=1)) == 2


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_tables_with_and_without_a_limit_are_other_tokens(opened, tmp_path, ending):
    """One cache, one file: what was tokenised for a trial is not taken for the whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, table = tmp_path / f"a.{ending}", pa.table({"text": ["x" * 20, "y" * 20, "z" * 20]})
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
    sizes = [opened(path, limit=limit).ends[-1] for limit in (1, None, 2, 1)]
    assert sizes == [21, 63, 42, 21]


def test_bad_data_are_named_with_rule_and_remedy(opened, tmp_path):
    np.save(tmp_path / "few.npy", np.arange(5, dtype=np.uint16))
    text = said(lambda: opened(tmp_path / "few.npy"))
    assert "it holds 5 tokens, and a sequence has 8; give more, or a smaller train_dataset" in text
    np.save(tmp_path / "big.npy", np.array([5] * 20 + [259], np.uint16))
    text = said(lambda: opened(tmp_path / "big.npy"))
    assert "big.npy: id 259 at place 20: the model's ids are 0 to 258; tokenise with" in text
    np.save(tmp_path / "low.npy", np.array([5] * 20 + [-1], np.int32))
    assert "id -1 at place 20" in said(lambda: opened(tmp_path / "low.npy"))
    np.save(tmp_path / "real.npy", np.zeros((4, 4)))
    assert "holds float64 of shape [4, 4], not one" in said(lambda: opened(tmp_path / "real.npy"))
    (tmp_path / "raw.bin").write_bytes(bytes(64))
    assert "there is no raw.idx beside it" in said(lambda: opened(tmp_path / "raw.bin"))
    write_indexed(tmp_path / "cut.bin", range(30), [40])
    assert "has 30 numbers, and cut.idx counts 40" in said(lambda: opened(tmp_path / "cut.bin"))
    write_indexed(tmp_path / "odd.bin", range(30), code=7)
    assert "odd.idx is not an index of Megatron" in said(lambda: opened(tmp_path / "odd.bin"))
    (tmp_path / "no.npy").write_bytes(b"no array")
    assert "no.npy: cannot be read: " in said(lambda: opened(tmp_path / "no.npy"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 5}\n{"body": "b"}\n{"text": "c"\n')
    text = said(lambda: opened(tmp_path / "bad.jsonl"))
    assert all(f"bad.jsonl:{line}: " in text for line in (2, 3, 4)) and 'no "text"' in text
    assert "is empty in all 1 rows" in said(lambda: opened(write_lines(tmp_path / "e.jsonl", "")))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    assert "latin.txt: not UTF-8 (byte 3)" in said(lambda: opened(tmp_path / "latin.txt"))
    (tmp_path / "mix").mkdir()
    (tmp_path / "mix" / "a.txt").write_text("text"), np.save(tmp_path / "mix" / "b.npy", [1, 2])
    assert "files of several kinds: text, tokens" in said(lambda: opened(tmp_path / "mix"))


def test_a_shard_that_changes_under_a_run_ends_it(opened, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(200, dtype=np.uint8))
    data = opened(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.arange(200, dtype=np.uint8)[::-1])
    (tmp_path / "b.npy").rename(tmp_path / "a.npy")
    with pytest.raises(RunError, match=r"a\.npy was changed while the run reads from it"):
        data.batch(0, 1)


def test_a_stream_without_ends_of_documents_is_warned_of(opened, tmp_path):
    np.save(tmp_path / "a.npy", np.full(50, 7, np.uint8))
    (warning,) = opened(tmp_path / "a.npy").warnings
    assert "the id 1 that ends a document was not found in it" in warning
    assert not opened(tmp_path / "a.npy", mask_documents=False).warnings


def test_a_text_that_changes_while_it_is_tokenised_ends_the_run(opened, tmp_path, monkeypatch):
    """Between the digest that names the shard and the read: it would be found by other texts."""
    path, plain = tmp_path / "a.txt", shards.file_digest
    path.write_text("some text of the run")

    def digest(file):
        found = plain(file)
        file.write_text("another text, longer")
        return found

    monkeypatch.setattr(shards, "file_digest", digest)
    with pytest.raises(RunError, match=r"a\.txt was changed while the run reads from it"):
        opened(path)
    assert not list((tmp_path / "tokens").glob("*.npy"))


def test_the_id_that_ends_a_document_is_part_of_the_state(tokenizer, opened, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(200, dtype=np.uint8))
    other = replace(tokenizer, eos_id=9)
    for mask, differs in ((True, True), (False, False)):
        data = opened(tmp_path / "a.npy", mask_documents=mask)
        again = TokenSequences(data.shards, other, data.source, VOCAB)
        assert (again.state() != data.state()) == differs


def test_a_broken_file_is_named_and_not_the_cache(opened, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {n}" for n in range(50)]}), path)
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    text = said(lambda: opened(path))
    assert "a.parquet:1: cannot be read: " in text and "(and 49 more rows alike)" in text
    assert "fileroot" not in text and "tokens go to" not in text
    (tmp_path / "folder.txt").mkdir()
    text = said(lambda: opened(tmp_path / "*.txt"))
    assert "folder.txt is a folder, not a file" in text


def test_a_cache_that_cannot_be_written_is_named(opened, tmp_path, monkeypatch):
    def write(number):
        def fail(*args):
            raise OSError(number, os.strerror(number))

        return fail

    path = write_lines(tmp_path / "a.jsonl", "some text")
    for number, has_remedy in ((errno.ENOSPC, True), (errno.EIO, False)):
        monkeypatch.setattr(shards, "write_shard", write(number))
        text = said(lambda: opened(path))
        assert f"its tokens go to {tmp_path / 'tokens'}: {os.strerror(number)}" in text
        assert ("set fileroot" in text) == has_remedy


def test_a_page_beside_rows_is_not_data(opened, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "train.jsonl", "x" * 20)
    alone = opened(folder).state()
    (folder / "README.md").write_text("what these rows are")
    assert opened(folder).state() == alone
    np.save(folder / "b.npy", [1, 2])
    assert "files of several kinds: jsonl, tokens" in said(lambda: opened(folder))


def test_texts_that_begin_with_the_prefix_get_it_once(tokenizer_folder, tmp_path):
    found = load_tokenizer(tokenizer_folder(tmp_path / "model", bos=True))
    path = write_lines(tmp_path / "a.jsonl", "<bos>first text", "second text")
    data = data_source(path=str(path), max_length=LENGTH)
    ids = open_tokens(data, found, found.vocab_size, tmp_path / "tokens").shards[0].ids
    (begin,) = found.prefix_ids
    assert (ids == begin).sum() == 2 and ids[0] == begin != ids[1]


@pytest.mark.parametrize("place", [300, 4 * 64 - 1, 511])
def test_an_id_between_the_blocks_that_are_looked_at_is_named_with_its_place(
    opened, tmp_path, monkeypatch, place
):
    monkeypatch.setattr(shards, "BLOCK", 16)
    monkeypatch.setattr(shards, "MAX_BLOCKS", 2)  # the first and the last
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.full(512, 5, np.uint16))
    ids = np.full(512, 5, np.uint16)
    ids[place] = VOCAB + 7
    np.save(tmp_path / "b.npy", ids)
    if place == 511:
        text = said(lambda: opened(tmp_path / "*.npy"))
    else:
        data = opened(tmp_path / "*.npy")
        text = said(lambda: [data.example(index) for index in range(len(data))])
    assert text.startswith(f"token shard = {tmp_path / 'b.npy'}: id {VOCAB + 7} at place {place}: ")
