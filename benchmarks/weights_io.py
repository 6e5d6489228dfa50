"""Loading and saving a HF folder of about 1 GB, beside transformers, each in a fresh process.

    python benchmarks/weights_io.py [--repeats 5] [--out benchmarks/weights_io.md]

Loaded weights are read once in full, since a mapped file costs nothing until then; "and write" also
writes each in place, as a first optimizer step does: transformers' parameters are the mapped file
until then, ours are memory of their own. The page cache is warm for both. Saved files are forced to
disk within the measured time for both; ours are also read back and compared. Memory is the peak of
the process above what it had before, as a whole (RSS) and without pages of mapped files
(anonymous), which the kernel may drop.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 65536,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "architectures": ["Qwen3ForCausalLM"],
}
CASES = (
    "load ours",
    "load transformers",
    "load and write ours",
    "load and write transformers",
    "save ours",
    "save transformers",
)


class Memory:
    """Peak memory of this process above its start, watched from a thread."""

    def __init__(self) -> None:
        self.start, self.peak, self.done = read_memory(), read_memory(), threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while not self.done.wait(0.005):
            self.peak = tuple(map(max, self.peak, read_memory()))

    def stop(self) -> tuple[int, int]:
        self.done.set()
        self.thread.join()
        self.peak = tuple(map(max, self.peak, read_memory()))
        return self.peak[0] - self.start[0], self.peak[1] - self.start[1]


def read_memory() -> tuple[int, ...]:
    """(RSS, anonymous) in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[key].split()[0]) << 10 for key in ("VmRSS", "RssAnon"))


def run_case(case: str, folder: str, out: str) -> dict[str, float]:
    import torch
    import transformers

    from pentad.models.registry import load_model, save_model

    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM
    model = None
    if case == "save ours":
        model = load_model(folder, dtype=torch.bfloat16)
    elif case == "save transformers":
        model = theirs.from_pretrained(folder, dtype=torch.bfloat16)
    if model is not None:
        touch(model)
    memory, start, cpu = Memory(), time.perf_counter(), time.process_time()
    if case.startswith("load") and case.endswith("ours"):
        touch(load_model(folder, dtype=torch.bfloat16), "write" in case)
    elif case.startswith("load"):
        touch(theirs.from_pretrained(folder, dtype=torch.bfloat16), "write" in case)
    elif case == "save ours":
        save_model(model, out, source_folder=folder)
    else:
        model.save_pretrained(out)
        for file in Path(out).iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    seconds = time.perf_counter() - start
    cpu = time.process_time() - cpu
    rss, anonymous = memory.stop()
    return {"seconds": seconds, "cpu": cpu, "rss": rss, "anonymous": anonymous}


def touch(model, is_written: bool = False) -> None:
    """Reads every byte of every parameter, or reads and writes it."""
    import torch

    for parameter in model.parameters():
        words = parameter.detach().view(-1).view(torch.int64)
        words.add_(0) if is_written else words.sum()


def measure(repeats: int) -> tuple[int, dict[str, list[dict[str, float]]]]:
    results: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = f"{scratch}/model"
        make_folder(folder)
        size = (Path(folder) / "model.safetensors").stat().st_size
        for repeat in range(repeats):
            for case in CASES:
                command = [
                    sys.executable,
                    __file__,
                    "--case",
                    case,
                    folder,
                    f"{scratch}/out{repeat}",
                ]
                text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                results[case].append(json.loads(text.splitlines()[-1]))
                subprocess.run(["rm", "-rf", f"{scratch}/out{repeat}"], check=True)
    return size, results


def make_folder(folder: str) -> None:
    import torch

    from pentad.models.families import dims_of
    from pentad.models.registry import create_model, save_model

    model = create_model(dims_of(CONFIG), dtype=torch.bfloat16, seed=1)
    save_model(model, folder, hf_config=CONFIG)


def table(size: int, results: dict[str, list[dict[str, float]]]) -> str:
    lines = [
        "| case | seconds (median) | min - max | GB/s | CPU s | peak RSS, MB | anonymous, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, runs in results.items():
        seconds = [run["seconds"] for run in runs]
        median = statistics.median(seconds)
        peaks = [statistics.median(run[key] for run in runs) / 1e6 for key in ("rss", "anonymous")]
        lines.append(
            f"| {case} | {median:.2f} | {min(seconds):.2f} - {max(seconds):.2f} "
            f"| {size / median / 1e9:.2f} | {statistics.median(run['cpu'] for run in runs):.2f} "
            f"| {peaks[0]:.0f} | {peaks[1]:.0f} |"
        )
    return "\n".join(lines)


def page(size: int, repeats: int, body: str) -> str:
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    machine = f"{os.cpu_count()} cores {platform.machine()}"
    return (
        "# Loading and saving weights\n\n"
        f"`python benchmarks/weights_io.py --repeats {repeats}`: a Qwen3 folder of "
        f"{size / 1e9:.2f} GB (bfloat16), {machine}, {versions}. Each run is a fresh process;\n"
        "loads read every byte, saves reach the disk, ours are also read back and compared.\n"
        "Memory is above what the process had before.\n\n" + body + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs=3)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(*args.case)))
        return
    size, results = measure(args.repeats)
    text = page(size, args.repeats, table(size, results))
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
