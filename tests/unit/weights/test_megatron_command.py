"""`pentad convert` as people type it: what it says, and how it ends."""

import pytest
from megatron_models import bytes_of_folder, hf_folder
from typer.testing import CliRunner

from pentad.cli.main import app


@pytest.fixture
def source(tmp_path):
    return hf_folder(tmp_path / "hf", "mixed")


def pentad(*words):
    done = CliRunner().invoke(app, ["convert", *map(str, words)])
    return done.exit_code, done.output


def test_there_and_back_is_byte_identical(source, tmp_path):
    code, said = pentad(source, tmp_path / "mg", "--to", "legacy", "--tp", 2, "--pp", 2)
    assert code == 0 and "mg: written (4 files" in said
    assert "Megatron needs, besides --use-checkpoint-args: --norm-epsilon 1e-06 --qk-lay" in said
    code, said = pentad(source, tmp_path / "mg", "--to", "legacy", "--tp", 2, "--pp", 2)
    assert code == 0 and "mg: already there (4 files" in said and "nothing was done" in said
    code, said = pentad(tmp_path / "mg", tmp_path / "back")
    assert code == 0 and "back: written (1 files" in said and "Megatron needs" not in said
    assert bytes_of_folder(tmp_path / "back") == bytes_of_folder(source)


def test_megatron_is_torch_dist_and_the_default_from_hf(source, tmp_path):
    assert pentad(source, tmp_path / "a")[0] == 0
    assert pentad(source, tmp_path / "b", "--to", "megatron")[0] == 0
    assert (tmp_path / "a" / "release" / ".metadata").is_file()
    assert bytes_of_folder(tmp_path / "a").keys() == bytes_of_folder(tmp_path / "b").keys()


def test_checkpoints_are_filed_and_found_by_iteration(source, tmp_path):
    assert pentad(source, tmp_path / "mg", "--iteration", 12, "--to", "legacy")[0] == 0
    assert (tmp_path / "mg" / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert (tmp_path / "mg" / "iter_0000012" / "mp_rank_00").is_dir()
    code, said = pentad(tmp_path / "mg", tmp_path / "out", "--iteration", 13)
    assert code == 2 and "iter_0000013: there is no such checkpoint" in said
    assert pentad(tmp_path / "mg", tmp_path / "out", "--iteration", 12)[0] == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--to", "gguf"],
            "--to gguf: no such format; use one of hf, megatron,",
        ),
        (["--spec", "apex"], "--spec apex: no such layer spec; use te or local"),
        (["--processes", "0"], "--processes 0: must be at least 1"),
        (["--iteration", "3", "--release"], "keep one of the two"),
        (["--tp", "0"], "tp = 0: must be at least 1"),
        (["--dtype", "int8"], "dtype = int8: no such type; use one of float32"),
        (["--model", "gpt9"], "model_type = gpt9: no such model family"),
    ],
)
def test_bad_words_get_a_sentence_and_code_2(source, tmp_path, words, sentence):
    code, said = pentad(source, tmp_path / "mg", *words)
    assert code == 2
    assert sentence in " ".join(said.split())
    assert not (tmp_path / "mg").exists()


def test_a_folder_that_is_none_gets_a_sentence(tmp_path):
    code, said = pentad(tmp_path / "nothing", tmp_path / "mg")
    assert code == 2 and "there is no such folder" in said
