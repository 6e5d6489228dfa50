"""The guessing game of docs/workflows.md, trained as it stands; what people see of it."""

import json
import re
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pentad.data.toy import write_byte_model
from pentad.telemetry.steps import read_lines

PAGE = (Path(__file__).parents[2] / "docs" / "workflows.md").read_text()
QUESTION = re.search(r'"prompt": "(Guess [^"]+)"', PAGE)[1]


def test_the_guessing_game_of_the_page_learns_and_is_shown_as_a_conversation(lab, tmp_path, capsys):
    source = re.search(r"```python\n(.*?class Guess.*?)```", PAGE, re.DOTALL)[1]
    (tmp_path / "guess.py").write_text(source)
    write_byte_model(tmp_path / "model")
    rows = [json.dumps({"prompt": QUESTION, "answer": str(n)}) for n in (3, 7, 31, 37)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    summary = lab.train(
        f"actor.path={tmp_path}/model",
        f"train_dataset.path={tmp_path}/rows.jsonl",
        "train_dataset.chat_template=true",
        f"rollout.workflow={tmp_path}/guess.py:guessing",
        "reward.fn=null",
        "gconfig.n_samples=16",
        "gconfig.max_new_tokens=4",
        "actor.optimizer.lr=1e-2",
        "total_train_steps=12",
        "total_train_epochs=12",
        "telemetry.tensorboard=true",
    )
    rewards = [step["rl"]["reward_mean"] for step in read_lines(summary.records / "steps.jsonl")]
    assert len(rewards) == 12 and sum(rewards[-3:]) > 2 * sum(rewards[:3]), rewards
    lines = read_lines(summary.records / "samples.jsonl")
    talks = [line for line in lines if len(line["turns"]) > 1]
    assert talks and {line["question"] for line in lines} == {QUESTION}
    for line in talks:
        said = [text for role, text in line["turns"] if role == "assistant"]
        told = [text for role, text in line["turns"] if role == "user"]
        assert "\n".join(said) == line["text"] and set(told) <= {"too low", "too high"}
    printed = capsys.readouterr().out
    shown = printed[printed.index("worst of step") :]
    assert f"    {QUESTION}\n" in shown and "<|im_start|>" not in shown
    found = EventAccumulator(str(summary.records / "tensorboard"))
    found.Reload()
    (text,) = found.Tensors("samples")[-1].tensor_proto.string_val
    assert QUESTION in text.decode()
