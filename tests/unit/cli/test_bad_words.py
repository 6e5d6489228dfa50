"""Nonsense on the command line ends in one sentence and exit code 2, never in a traceback."""

import json

import pytest
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.data.toy import write_byte_model
from pentad.models.registry import create_model, dims_of, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("words")
    write_byte_model(root / "plain")
    model = create_model(dims_of(root / "plain"), seed=1)
    save_model(model, root / "m", source_folder=root / "plain", tokenizer_folder=root / "plain")
    (root / "t").mkdir()
    row = {"prompt": "a", "answer": "b", "response": "c"}
    (root / "t" / "d.jsonl").write_text(json.dumps(row) + "\n")
    (root / "leaving.py").write_text("import sys; sys.exit(3)\n")
    hf = json.loads((root / "plain" / "config.json").read_text())
    odd = {"layer_types": 3, "use_sliding_window": True, "sliding_window": 4}
    (root / "round").symlink_to("round")
    (root / "odd").mkdir()
    (root / "odd" / "config.json").write_text(json.dumps(hf | odd))
    return root


EVAL = "eval m --data t/d.jsonl --reward exact_match"
S3 = "verify-checkpoint s3://bucket/x"
TRAIN = "train actor.path=m train_dataset.path=t/d.jsonl train_dataset.batch_size=1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve ~nobody-of-that-name", "no such folder"),
        ("serve m --kv-cache-gb nan", "Invalid value for '--kv-cache-gb'"),
        ("serve m --kv-cache-gb 1e-8", "--kv-cache-gb of serve"),
        ("serve m --max-body-mb inf", "Invalid value for '--max-body-mb'"),
        (
            "serve m --model-files leaving.py:SPEC",
            "cannot be imported (SystemExit: 3 (leaving.py, ",
        ),
        ("verify-model leaving.py:SPEC", "cannot be imported (SystemExit: 3 (leaving.py, "),
        ("plan actor.path=m --gpu-memory inf", "Invalid value for '--gpu-memory'"),
        (f"plan actor.path=m cluster.n_nodes={2**63 - 1}", "and at most 100000"),
        (f"plan actor.path=m cluster.n_gpus_per_node={2**63 - 1}", "and at most 100000"),
        ("plan actor.path=m rollout.kv_cache_gb=1e300", "at most 1e+06"),
        ("plan actor.path=odd", "layer_types = 3: must name sliding_attention"),
        ("convert m out --to legacy --make-vocab-size-divisible-by 0", "Invalid value for"),
        ("convert m out --to hf --iteration 3", "m and out are HF folders; leave it out"),
        ("convert m out --to legacy --etp 7", "etp = 7: qwen3 has no experts"),
        (f"{EVAL} --out t", "--out = t: is a folder; give the name of a file"),
        (f"{EVAL} --format hf", "format = hf reads a folder"),
        (f"{EVAL} --out t/d.jsonl/x", "--out = t/d.jsonl/x: cannot be written"),
        (f"{EVAL} --out round", "--out = round: cannot be written: Too many levels"),
        (f"{EVAL} --address http://127.0.0.1:99999", "is not an address (Port out of range"),
        (f"{EVAL} --address http://127.0.0.1:-1", "is not an address (Port could not be cast"),
        (f"{EVAL} --address http://[::1", "is not an address (Invalid IPv6 URL)"),
        (f"{EVAL} --address file:///etc/passwd", "is not an address http://HOST:PORT"),
        (f"{EVAL} --address http://127.0.0.1:0", "0 is not a port"),
        (f"{EVAL} --device meta", "device = meta: no such device; give auto, cpu or cuda"),
        (f"{EVAL} --device xla", "device = xla: no such device; give auto, cpu or cuda"),
        (f"{S3} --endpoint-url http://127.0.0.1:99999", "is not an address (Port out of range"),
        (f"{S3} --endpoint-url localhost", "is not an address http://HOST:PORT"),
        (f"serve m --max-context {10**30}", "Invalid value for '--max-context'"),
        ('serve m --template-args {"a":' + "9" * 5000 + "}", "is not a mapping of names to values"),
        ("serve m --template-args " + "[" * 5000, "is not a mapping of names to values"),
        ("eval plain --data t/d.jsonl --reward exact_match", "no *.safetensors; save it as"),
        (f"{TRAIN} reward.fn=leaving.py:f", "it cannot be imported (SystemExit: 3 (leaving.py, "),
        (
            f"{TRAIN} rollout.workflow=leaving.py:C",
            "it cannot be made (SystemExit: 3 (leaving.py, ",
        ),
        ("verify-parallel qwen3 --world 100000", "starts 100000 processes here"),
    ],
)
def test_bad_words_get_a_sentence(folder, monkeypatch, words, said):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, words.split())
    assert isinstance(shown.exception, SystemExit), shown.exception
    assert shown.exit_code == 2
    assert said in shown.output
    assert not (folder / "runs").exists()  # nothing was started
