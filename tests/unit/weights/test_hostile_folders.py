"""Model folders from elsewhere: nothing in them runs, blocks, fills memory or is exported."""

import json
import os
import resource
import shutil
import signal
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from pentad.cli import main as cli
from pentad.core.errors import UserError
from pentad.data.tokenizer import load_tokenizer
from pentad.data.toy import write_model, write_task
from pentad.models.families import dims_of, read_config
from pentad.models.registry import create_model, load_model, save_model
from pentad.weights.files import SafeFile
from pentad.weights.hf import INDEX, SINGLE, HfFolder, copy_companions
from pentad.weights.transfer import is_finite


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    bare = tmp_path_factory.mktemp("bare")
    write_model(bare)
    folder = tmp_path_factory.mktemp("models") / "good"
    save_model(create_model(dims_of(bare), seed=3), folder, source_folder=bare)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(good, tmp_path / "m")


@pytest.fixture(autouse=True)
def in_time():
    """A pipe that is opened blocks for ever."""

    def too_late(*_):
        raise TimeoutError("still reading after 60 s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def evaluate(folder, tmp_path, **options):
    write_task(tmp_path / "data", seed=1, num_train=1, num_sft=1, num_valid=2)
    data = tmp_path / "data" / "valid.jsonl"
    args = ["eval", str(folder), "--data", str(data), "--reward", "exact_match", "--device", "cpu"]
    return CliRunner().invoke(cli.app, [*args, "--max-new-tokens", "2"], **options)


def change_json(path, **more: object):
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def test_code_of_a_folder_does_not_run_even_after_a_typed_yes(folder, tmp_path):
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Own\n"
    (folder / "own.py").write_text(code)
    change_json(
        folder / "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["own.Own", "own.Own"]},
    )
    # Of a family that transformers knows it takes its own class; of another it asks.
    change_json(folder / "config.json", model_type="other", auto_map={"AutoConfig": "own.Own"})
    done = evaluate(folder, tmp_path, input="y\ny\ny\n")
    assert not mark.exists(), "the folder's code was run"
    assert done.exit_code == 2 and "Traceback" not in done.output
    with pytest.raises(UserError, match="the tokenizer does not load"):
        load_tokenizer(folder)


def spoil(folder, change):
    weights = load_file(folder / SINGLE)
    name = sorted(weights)[0]
    weights[name] = change(weights[name].clone())
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})
    return name


def put(value):
    def change(tensor):
        tensor.view(-1)[5] = value
        return tensor

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_numbers_are_refused_by_name(folder, tmp_path, value, dtype):
    name = spoil(folder, lambda tensor: put(value)(tensor.to(dtype)))
    done = evaluate(folder, tmp_path)
    assert done.exit_code == 2
    said = f"{folder}: {name}: holds numbers that are NaN or infinite"
    assert said in " ".join(done.stderr.split()), done.output
    with pytest.raises(UserError, match=name):
        load_model(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_number_is_looked_at(dtype):
    for size in (0, 1, 7, 200_003):
        good = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
        largest, lowest = torch.finfo(dtype).max, torch.finfo(dtype).min
        good[:4] = torch.tensor([largest, lowest, -0.0, 0.0], dtype=dtype)[: len(good[:4])]
        assert is_finite(good) and is_finite(-good)
        assert good.untyped_storage().resizable(), "trainers resize it to free memory"
        for at in {0, size // 2, size - 1} if size else ():
            for value in ("nan", "inf", "-inf"):
                bad = good.clone()
                bad[at] = float(value)
                assert not is_finite(bad) and not is_finite(-bad), (size, at, value)


def test_large_numbers_are_no_infinite_ones(folder):
    name = spoil(folder, lambda tensor: torch.full_like(tensor, 3e38))
    model = load_model(folder)
    assert max(float(p.detach().max()) for p in model.parameters()) > 2e38
    with pytest.raises(UserError, match=f"{name}: holds numbers too large for float16"):
        load_model(folder, dtype=torch.float16)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_quantised_weights_without_their_scales_are_refused(folder, tmp_path, kind):
    name = spoil(folder, lambda tensor: tensor.to(kind))
    done = evaluate(folder, tmp_path)
    assert done.exit_code == 2
    assert f"{name}: holds {kind}, and weights are floating point" in " ".join(done.stderr.split())


def write_header(path, text: bytes, size: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", size or len(text)) + text)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested too deeply"),
        (b'{"a":{"dtype":"F32","shape":[1' + b"0" * 30 + b'],"data_offsets":[0,4]}}', "shape or"),
        (
            b'{"a":{"dtype":"F32","shape":[4000000000,4000000000],"data_offsets":[0,0]}}',
            "0 bytes are not F32",
        ),
        (b'{"a":' + b"9" * 5000 + b"}", "is not a safetensors file"),
    ],
)
def test_headers_that_overflow_are_refused(tmp_path, header, said):
    write_header(tmp_path / SINGLE, header)
    with pytest.raises(UserError, match=said):
        HfFolder(tmp_path)


def test_a_header_of_gigabytes_is_refused_unread(tmp_path):
    file = tmp_path / SINGLE
    write_header(file, b"{", size=3 << 30)
    os.truncate(file, (3 << 30) + 100)  # a file with a hole, which takes no disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=f"its header has {3 << 30} bytes"):
        SafeFile(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_config_that_is_too_deep_or_too_large_is_refused(folder):
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"config.json: is not JSON \(it is nested too deeply"):
        read_config(folder)
    os.truncate(folder / "config.json", 3 << 30)
    with pytest.raises(UserError, match="config.json: has 3221225472 bytes"):
        read_config(folder)


@pytest.mark.parametrize(
    "name", ["config.json", SINGLE, INDEX, "tokenizer.json", "merges.txt", "generation_config.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_never_opened(folder, tmp_path, name, kind):
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    if kind == "pipe":
        done = evaluate(folder, tmp_path)
        assert done.exit_code == 2
        assert name in done.stderr and "Traceback" not in done.output
    with pytest.raises(UserError, match=f"{name}: is a pipe, a socket or a device, not a file"):
        load_tokenizer(folder)
    with pytest.raises(UserError, match=f"{name}: is a pipe, a socket or a device, not a file"):
        load_model(folder)


def test_a_link_out_of_the_folder_is_not_exported(folder, tmp_path):
    (tmp_path / "secret").write_text("the secret")
    (folder / "merges.txt").symlink_to(tmp_path / "secret")
    model = load_model(folder)
    with pytest.raises(UserError, match=r"merges.txt: is a link to .*secret, outside the folder"):
        save_model(model, tmp_path / "out", source_folder=folder)
    assert not (tmp_path / "out").exists() and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(UserError, match="outside the folder"):
        load_tokenizer(folder)  # before a run starts, not at its first export


@pytest.mark.parametrize(
    ("place", "target"),
    [("0123", "../../blobs/x"), ("0123", "other.txt"), ("0123/step-5", "../../../blobs/x")],
)
def test_links_within_a_model_of_the_hubs_cache_are_followed(tmp_path, place, target):
    folder = tmp_path / "models--a--b" / "snapshots" / place
    folder.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (folder / "merges.txt").symlink_to(target)
    (folder / target).write_text("a b")
    given = tmp_path / "by-a-link"  # folders are linked to as well
    given.symlink_to(folder)
    for source in (folder, given):
        out = tmp_path / f"out-{source.name}"
        out.mkdir()
        copy_companions([source], out)
        assert (out / "merges.txt").read_text() == "a b" and not (out / "merges.txt").is_symlink()


def test_a_folder_named_like_the_caches_opens_nothing_around_it(tmp_path):
    folder = tmp_path / "snapshots" / "m"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("the secret")
    (folder / "merges.txt").symlink_to("../../secret")
    with pytest.raises(UserError, match="outside the folder"):
        copy_companions([folder], tmp_path)
