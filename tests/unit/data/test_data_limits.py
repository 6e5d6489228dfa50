"""Whatever is read from outside has an end: in time, in size, in depth, with one sentence."""

import contextlib
import json
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sections import data_source

from pentad.core.errors import UserError
from pentad.data import arrow, cut, rows, shards
from pentad.data.render import BadRow, check_source, render
from pentad.data.rows import open_rows
from pentad.data.tokenizer import MAX_EXPANSION, load_tokenizer

MIB = 1 << 20


@contextlib.contextmanager
def bounded(max_s: float = 60.0, max_bytes: int = 2 << 30):
    """What is called within ends, and takes little time and memory of this process."""
    before, began = peak_bytes(), time.process_time()
    yield
    assert time.process_time() - began < max_s
    assert peak_bytes() - before < max_bytes


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_a_text_that_memory_does_not_hold_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x" * 60)
    monkeypatch.setattr(shards, "host_memory", lambda: (200, 100))
    with pytest.raises(UserError, match="a.txt: has 60 bytes of text, and half .* is 50; split it"):
        shards.TextFiles([tmp_path / "a.txt"], "text").row(0)


# --- rows -------------------------------------------------------------------------------------


def oversized_line(path: Path) -> None:
    path.write_text(json.dumps({"prompt": "x" * (40 << 20)}) + "\n")


def endless_line(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)  # zeros, and no end of line


def nested_line(path: Path) -> None:
    path.write_text('{"prompt":' + "[" * 200_000 + "\n")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (oversized_line, "rows.jsonl:1: the line is longer than 32 MiB; split the row"),
        (endless_line, "rows.jsonl:1: the line is longer than 32 MiB; split the row"),
        (nested_line, "rows.jsonl:1: cannot be read: maximum recursion depth exceeded"),
    ],
)
def test_lines_have_an_end(tmp_path, write, sentence, streaming):
    write(tmp_path / "rows.jsonl")
    with bounded(), pytest.raises(UserError, match="rows.jsonl:1") as caught:
        open_rows(str(tmp_path / "rows.jsonl"), streaming=streaming).row(0)
    assert sentence in str(caught.value)


def test_a_line_of_the_longest_length_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 20)
    (tmp_path / "a.jsonl").write_text('{"prompt": "1234"} \n{"prompt": "12345"} \n')
    with pytest.raises(UserError, match="a.jsonl:2"):
        open_rows(str(tmp_path / "a.jsonl"))


def repeated_text(path: Path) -> None:
    """A text of 1 MiB, a million times: a terabyte in some kilobytes."""
    text = pa.array(["x" * MIB])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int32()), text)
    pq.write_table(pa.table({"prompt": column}), path)


def repeated_text_in_messages(path: Path) -> None:
    text = pa.array(["x" * MIB])
    content = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), text)
    item = pa.StructArray.from_arrays([content], ["content"])
    offsets = pa.array(range(100_001), pa.int32())
    pq.write_table(pa.table({"prompt": pa.ListArray.from_arrays(offsets, item)}), path)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("write", [repeated_text, repeated_text_in_messages])
def test_a_parquet_file_that_unpacks_to_a_terabyte_is_read_row_by_row(tmp_path, write, streaming):
    write(tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < 10 * MIB
    with bounded():
        found = open_rows(str(tmp_path / "bomb.parquet"), streaming=streaming)
        assert "x" * MIB in str(found.row(len(found) - 1)["prompt"])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_parquet_row_of_too_much_text_is_a_sentence(tmp_path, streaming):
    talk = [[{"role": "user", "content": "x"}], [{"role": "user", "content": "x" * (40 << 20)}]]
    pq.write_table(pa.table({"m": talk}), tmp_path / "big.parquet")
    found = open_rows(str(tmp_path / "big.parquet"), streaming=streaming)
    assert found.row(0) == {"m": talk[0]}
    with bounded(), pytest.raises(UserError, match=r"big.parquet:2: .* more than 32 MiB of text"):
        found.row(1)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_parquet_file_of_more_than_there_is_memory_is_a_sentence(
    tmp_path, monkeypatch, streaming
):
    """Equal numbers take no room in the file, and 16 bytes each are reckoned with."""
    pq.write_table(pa.table({"prompt": pa.array([7] * 10**7)}), tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < MIB
    monkeypatch.setattr(arrow, "host_memory", lambda: (1 << 30, 10**7))
    monkeypatch.setattr(arrow, "row_groups", arrow.RowGroupCache())
    with pytest.raises(UserError, match="GiB are free for it; save it as JSON lines"):
        open_rows(str(tmp_path / "bomb.parquet"), streaming=streaming).row(0)


def test_streamed_row_groups_are_kept_as_many_as_fit(tmp_path, monkeypatch):
    """A group takes a quarter of the memory there is, or a twentieth: none is refused."""
    row_bytes = 16 * 1000 + 600  # reckoned: 1000 numbers of a row group, and what is stored
    for share, num_kept in ((4, 2), (20, arrow.ROW_GROUPS_KEPT)):
        path = tmp_path / f"{share}.parquet"
        table = pa.table({"prompt": pa.array(range(20_000), type=pa.int64())})
        pq.write_table(table, path, row_group_size=1000, compression="none", use_dictionary=False)
        size = arrow.unpacked_bytes(pq.ParquetFile(path), [0])
        assert size > row_bytes
        kept = arrow.RowGroupCache()
        monkeypatch.setattr(arrow, "row_groups", kept)
        held = lambda kept=kept: sum(size for _, size in kept.tables.values())  # noqa: E731
        memory = share * size
        monkeypatch.setattr(arrow, "host_memory", lambda m=memory, held=held: (m, m - held()))
        found = open_rows(str(path), streaming=True)
        for i in [*range(0, 20_000, 500), 0, 19_999]:
            assert found.row(i) == {"prompt": i}
            assert held() <= memory / 2
        assert len(kept.tables) == num_kept


def test_a_parquet_file_of_several_row_groups_is_read_whole(tmp_path):
    talk = [[{"role": "user", "content": f"{i % 3}"}] for i in range(50)]
    path = tmp_path / "good.parquet"
    pq.write_table(pa.table({"m": talk, "a": list(map(str, range(50)))}), path, row_group_size=7)
    for streaming in (False, True):
        found = open_rows(str(path), streaming=streaming)
        assert [found.row(i) for i in range(50)] == [{"m": talk[i], "a": str(i)} for i in range(50)]


# --- chat templates and tokenizers ------------------------------------------------------------

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(90) %}"
DOUBLE += "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
ENDLESS = {
    "looping": LOOP,
    "doubling": DOUBLE,
    "printing": LOOP.replace("{% endfor %}{% endfor %}", "xxxx{% endfor %}{% endfor %}"),
}
REFUSING = {
    "counting too far": "{% for a in range(10 ** 12) %}{% endfor %}",
    "nested": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "dividing": "{{ 1 / 0 }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_a_sentence(chat, monkeypatch, name):
    monkeypatch.setattr(cut, "MAX_CPU_S", 1.0)
    monkeypatch.setattr(chat.inner, "chat_template", ENDLESS[name])
    with bounded(max_bytes=6 << 30), pytest.raises(UserError) as caught:
        check_source(data_source(messages_key="messages"), chat)
    assert "chat template of" in str(caught.value) and "mend chat_template" in str(caught.value)


@pytest.mark.parametrize("name", REFUSING)
def test_a_template_that_fails_in_any_way_refuses_its_row(chat, monkeypatch, name):
    monkeypatch.setattr(chat.inner, "chat_template", REFUSING[name])
    with bounded(), pytest.raises(BadRow, match="the chat template rejects it: "):
        render([{"role": "user", "content": "x"}], chat, for_answer=True)


def test_templates_that_end_are_left_alone_in_all_threads(chat):
    texts = []

    def work():
        for i in range(200):
            texts.append(chat.render([{"role": "user", "content": f"{i}"}], for_answer=True))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 800 and len(set(texts)) == 200


def swallowed():
    with contextlib.suppress(cut.CutOff):
        while True:
            pass


def wrapped():
    try:
        while True:
            pass
    except Exception as error:
        raise ValueError("something else") from error


@pytest.mark.parametrize("body", [swallowed, wrapped])
def test_code_that_catches_the_end_of_its_time_ends_all_the_same(monkeypatch, body):
    monkeypatch.setattr(cut, "MAX_CPU_S", 0.1)

    def work():
        with contextlib.suppress(ValueError), cut.cut_off():
            body()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_where_threads_have_no_clock_the_time_of_the_wall_counts(monkeypatch):
    monkeypatch.delattr("time.pthread_getcpuclockid")
    monkeypatch.setattr(cut, "MAX_CPU_S", 0.4)
    with pytest.raises(cut.CutOff), cut.cut_off():
        while True:
            time.sleep(0.01)


def test_what_ends_as_its_time_is_over_is_cut_off_within_or_not_at_all():
    """Nothing is raised in what comes after it."""
    num_cut = 0
    for _ in range(200):
        try:
            with cut.cut_off():
                (call,) = cut._watch.calls
                with cut._watch.lock:
                    call.is_cut = True
                    cut._raise_in(call.thread, cut.CutOff)
        except cut.CutOff:
            num_cut += 1
        for _ in range(100):
            pass
    assert num_cut


def test_a_process_that_is_forked_while_a_template_is_watched_watches_its_own(chat):
    chat.render([{"role": "user", "content": "x"}], for_answer=True)
    code = "import os, pentad.data.cut as c, time\n"
    code += "c.MAX_CPU_S = 0.5\nwith c.cut_off(): pass\nif os.fork() == 0:\n"
    code += "  try:\n    with c.cut_off():\n      while True: pass\n"
    code += "  except c.CutOff: os._exit(7)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "7", out.stderr


def replacing(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


EXPANDING = {
    "oversized": replacing({"String": "a"}, "b" * 100_000),
    "an expression that matches nothing": replacing({"Regex": ""}, "b" * 100),
    "a chain": {
        "type": "Sequence",
        "normalizers": [
            replacing({"String": c}, d * 4) for c, d in zip("abcdefg", "bcdefgh", strict=True)
        ],
    },
}


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize("name", EXPANDING)
def test_a_tokenizer_that_makes_much_of_little_is_refused(plain_folder, tmp_path, name, part):
    value = json.loads(json.dumps(EXPANDING[name]).replace("normalizers", f"{part}s"))
    folder = spoilt(plain_folder, tmp_path, part, value)
    with bounded(), pytest.raises(UserError, match=rf"{part} can make .*at most {MAX_EXPANSION}"):
        load_tokenizer(folder)


def test_a_tokenizer_nested_without_end_is_a_sentence(plain_folder, tmp_path):
    folder = spoilt(plain_folder, tmp_path, "normalizer", None)
    file = folder / "tokenizer.json"
    nest = '{"type": "Sequence", "normalizers": [' * 100_000
    file.write_text(file.read_text().replace('"normalizer": null', f'"normalizer": {nest}'))
    with bounded(), pytest.raises(UserError, match="the tokenizer does not load: "):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "good", [replacing({"String": " "}, "\u2581"), replacing({"Regex": " {2,}"}, "x")]
)
def test_ordinary_replacements_are_accepted(plain_folder, tmp_path, good):
    assert load_tokenizer(spoilt(plain_folder, tmp_path, "normalizer", good)).encode("a b")


def spoilt(plain_folder, tmp_path, part, value) -> Path:
    shutil.copytree(plain_folder, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: value}))
    return tmp_path / "model"
