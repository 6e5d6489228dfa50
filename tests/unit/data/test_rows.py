"""Rows come from every supported kind of file in order, and bad files get a sentence."""

import datetime
import decimal
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pentad.core.errors import UserError
from pentad.data.rows import open_rows

ROWS = [{"question": f"{i} + {i}?", "answer": str(2 * i), "n": i} for i in range(25)]


def save_arrow(folder, rows, num_files=2):
    """What `datasets.Dataset.save_to_disk` writes (version 5.2)."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{num_files:05d}.arrow" for i in range(num_files)]
    size = -(-len(rows) // num_files)
    for i, name in enumerate(names):
        table = pa.Table.from_pylist(rows[i * size : (i + 1) * size])
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as w,
        ):
            w.write_table(table)
    state = {"_data_files": [{"filename": n} for n in names], "_fingerprint": "1", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.fixture(params=["jsonl", "parquet", "saved", "arrow_file", "folder", "pattern"])
def path(request, tmp_path, write_jsonl):
    kind = request.param
    if kind == "jsonl":
        return write_jsonl(ROWS)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "x.parquet", row_group_size=7)
        return str(tmp_path / "x.parquet")
    if kind == "saved":
        return str(save_arrow(tmp_path / "saved", ROWS))
    if kind == "arrow_file":
        table = pa.Table.from_pylist(ROWS)
        with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as writer:
            writer.write_table(table)
        return str(tmp_path / "x.arrow")
    for name, part in (("train-0.jsonl", ROWS[:10]), ("train-1.jsonl", ROWS[10:])):
        write_jsonl(part, f"parts/{name}")
    if kind == "folder":
        return str(tmp_path / "parts")
    write_jsonl(ROWS[:3], "parts/test-0.jsonl")
    return str(tmp_path / "parts" / "train-*.jsonl")


@pytest.mark.parametrize("streaming", [False, True])
def test_every_kind_gives_the_same_rows_in_order_and_by_index(path, streaming):
    rows = open_rows(path, streaming=streaming)
    assert len(rows) == 25
    assert [rows.row(i) for i in range(25)] == ROWS
    assert rows.row(17) == ROWS[17], "any row, at any time"


@pytest.mark.parametrize("streaming", [False, True])
def test_the_limit_takes_the_first_rows(path, streaming):
    rows = open_rows(path, streaming=streaming, limit=12)
    assert [rows.row(i) for i in range(len(rows))] == ROWS[:12]


def test_rows_know_their_file_and_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n   \n{"a": 2}\n\n{"a": 3}')
    for streaming in (False, True):
        rows = open_rows(str(file), streaming=streaming)
        assert [rows.row(i)["a"] for i in range(3)] == [1, 2, 3]
        assert [rows.where(i) for i in range(3)] == [f"{file}:1", f"{file}:4", f"{file}:6"]


def test_all_broken_lines_are_reported_together_with_their_numbers(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": \n[1, 2]\n"x"\n{"a": "\xff"}\n')
    with pytest.raises(UserError) as caught:
        open_rows(str(file))
    assert [str(problem) for problem in caught.value.problems] == [
        f"{file}:2: not JSON: Expecting value at column 1; one JSON object a line.",
        f"{file}:3: holds a list; one JSON object a line.",
        f"{file}:4: holds a str; one JSON object a line.",
        f"{file}:5: not UTF-8 (byte 7 of the line).",
    ]


def test_thousands_of_broken_lines_do_not_flood_the_screen(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f"{'[' * (i % 30)}nonsense\n" for i in range(5000)))
    with pytest.raises(UserError, match="and 1660 more rows with other problems") as caught:
        open_rows(str(file))
    assert len(caught.value.problems) == 21
    assert str(caught.value.problems[0]).startswith(f"{file}:1: not JSON")
    assert "(and 166 more rows alike)" in str(caught.value.problems[0])


def test_a_broken_line_met_while_streaming_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n{broken\n')
    rows = open_rows(str(file), streaming=True)
    with pytest.raises(UserError, match=r"a.jsonl:2: not JSON"):
        rows.row(1)


def test_missing_empty_and_unknown_files(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "folder").mkdir()
    for name, sentence in {
        "no.jsonl": "no such file or folder",
        "empty.jsonl": "it has no rows",
        "x.csv": "x.csv has no known ending; known endings: .jsonl, .ndjson, .parquet, .arrow",
        "folder": "the folder holds no file that ends in",
        "*.parquet": "no file fits this pattern",
    }.items():
        with pytest.raises(UserError, match="^train_dataset.path = ") as caught:
            open_rows(str(tmp_path / name), key="train_dataset.path")
        assert sentence in str(caught.value)


def test_the_format_key_overrules_the_ending(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}\n')
    assert open_rows(str(tmp_path / "x.json"), format="jsonl").row(0) == {"a": 1}


def test_test_files_are_never_mixed_into_train(tmp_path, write_jsonl):
    write_jsonl(ROWS, "gsm/train.jsonl"), write_jsonl(ROWS, "gsm/test.jsonl")
    with pytest.raises(UserError, match="several splits") as caught:
        open_rows(str(tmp_path / "gsm"))
    assert f"give a file, or a pattern such as {tmp_path / 'gsm' / 'train.jsonl'}" in str(
        caught.value
    )


def test_a_saved_dict_of_splits_wants_one_of_them(tmp_path):
    save_arrow(tmp_path / "d" / "train", ROWS)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="several splits; give .*/d/train or .*/d/test"):
        open_rows(str(tmp_path / "d"))
    assert len(open_rows(str(tmp_path / "d" / "train"))) == 25


def test_a_saved_dataset_with_a_missing_file_is_refused(tmp_path):
    folder = save_arrow(tmp_path / "saved", ROWS)
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match="not there: data-00001-of-00002.arrow"):
        open_rows(str(folder))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_torn_parquet_file_is_refused(tmp_path, streaming):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "x.parquet")
    whole = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is not a whole parquet file"):
        open_rows(str(tmp_path / "x.parquet"), streaming=streaming)


def test_columns_of_bytes_are_refused_and_dates_become_text(tmp_path):
    rows = [{"q": "a", "meta": {"image": b"\x00"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="column meta of .* holds bytes"):
        open_rows(str(tmp_path / "b.parquet"))
    dated = {"when": datetime.datetime(2026, 1, 2, 3), "cost": decimal.Decimal("1.50")}
    pq.write_table(pa.Table.from_pylist([dated]), tmp_path / "d.parquet")
    row = open_rows(str(tmp_path / "d.parquet")).row(0)
    assert row == {"when": "2026-01-02T03:00:00", "cost": "1.50"}
    json.dumps(row)


def test_without_pyarrow_the_remedy_is_named(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pentad.core.errors import UserError\n"
        "from pentad.data.rows import open_rows\n"
        f"try: open_rows({str(tmp_path / 'x.parquet')!r})\n"
        "except UserError as error: print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "parquet files need pyarrow; pip install 'pentad[parquet]'." in done.stdout


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000 + "]" * 100_000])
def test_values_that_break_the_parser_are_bad_rows(tmp_path, value):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": {value}}}\n')
    with pytest.raises(UserError, match=r"rows.jsonl:2: cannot be read"):
        open_rows(str(path))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("state.json", "{", "its state.json cannot be read"),
        ("state.json", "[]", "its state.json cannot be read"),
        ("state.json", '{"_data_files": 3}', "its state.json has _data_files = 3, not a list"),
        ("state.json", '{"_data_files": [3]}', "names files that are not there: none at all"),
        ("dataset_dict.json", "{", "its dataset_dict.json cannot be read"),
    ],
)
def test_a_saved_dataset_that_is_broken_is_told(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        open_rows(str(tmp_path))
