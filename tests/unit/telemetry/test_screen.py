"""What people watch fits 80 columns and tells the truth of the records, live or plain."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from rich.console import Console

from pentad.core.errors import one_line
from pentad.telemetry.record import Rl, StepRecord
from pentad.telemetry.screen import (
    LiveScreen,
    PlainScreen,
    Screen,
    clock,
    draw,
    number,
    open_screen,
    sample_lines,
    sparkline,
)


def rl_record(step, reward=0.5, **more):
    rl = Rl(
        reward_mean=reward,
        reward_std=0.25,
        length_mean=6.2,
        entropy=0.412,
        kl_ref=1.3e-5,
        clip_fraction=0.0131,
        logprob_diff_mean=2.1e-6,
        truncated_share=0.0,
    )
    values = {"loss": -0.00123, "grad_norm": 0.77, "tokens_per_sec": 18432.0, **more}
    return StepRecord(step=step, wall_clock_ms=2000.0, rl=rl, **values).as_json()


def sample(pick, reward=1.0, prompt="52341>", text="12345"):
    parts = {"correct": reward}
    return {"pick": pick, "step": 3, "prompt": prompt, "text": text} | {
        "reward": reward,
        "reward_parts": parts,
    }


EVALS = [
    {"version": 0, "accuracy": 0.412, "accuracy_ci95": 0.061, "reward_mean": 0.4},
    {"version": 60, "accuracy": 0.912, "accuracy_ci95": 0.031, "reward_mean": 0.9},
]


def drawn(picture, width=80, **options):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(draw(picture, **options))
    return out.getvalue()


@pytest.fixture
def picture():
    made = Screen("sort-digits/trial-0", 120)
    for step in range(1, 61):
        made.step(rl_record(step, reward=step / 60))
    made.evals.extend(EVALS)
    made.samples([sample("best"), sample("worst", 0.0, "9\n" * 200, "7" * 900)])
    return made


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_live_picture_fits_a_small_terminal(picture, ascii_only):
    lines = drawn(picture, ascii_only=ascii_only).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 24
    if ascii_only:
        body = [line for line in lines[1:-10]]
        assert "".join(body).isascii()


def test_the_live_picture_says_what_the_records_say(picture):
    text = drawn(picture)
    assert "step 60/120" in text and "ETA 2:00" in text
    assert "held out: accuracy 0.412 +- 0.061 (version 0) -> accuracy 0.912" in text
    assert "0.017 -> 1.000" in text, "first and last reward beside the curve"
    last = next(line for line in text.splitlines() if line.strip().startswith("60 "))
    expected = "60 ###### 1.000 0.250 6.200 0.412 1e-05 1.3 2e-06 0.770 18k 2.00"
    assert last.replace(chr(0x2588), "#").split() == expected.split()
    assert "best of step 3, reward 1.000 (correct 1.000)" in text
    assert "52341>" in text and "12345" in text
    assert "worst of step 3, reward 0.000" in text and r"9\n9\n" in text


def test_a_picture_without_any_record_can_be_drawn():
    assert "step 0/10" in drawn(Screen("x", 10)) and "starting" in drawn(Screen("x", 10))


def test_sft_shows_the_loss_and_no_empty_columns():
    picture = Screen("sft", 10)
    picture.step(StepRecord(step=1, loss=2.5, grad_norm=1.0, wall_clock_ms=100.0).as_json())
    picture.step(StepRecord(step=10, loss=1.5, grad_norm=1.0, wall_clock_ms=100.0).as_json())
    text = drawn(picture)
    assert "loss" in text and "2.500 -> 1.500" in text and "done" in text
    assert "reward" not in text and "clip%" not in text


def test_a_value_that_is_missing_is_a_dash_not_a_zero():
    picture = Screen("x", 10)
    picture.step(rl_record(1))
    picture.step(rl_record(2, grad_norm=float("nan")))
    row = next(line for line in drawn(picture).splitlines() if line.strip().startswith("2 "))
    assert " - " in row


def test_plain_lines_are_aligned_and_fit_80_columns():
    out = io.StringIO()
    screen = PlainScreen("sort-digits/trial-0", 120, out)
    screen.evaluation(EVALS[0])
    for step in range(1, 31):
        screen.samples([sample("best"), sample("worst", 0.0, text="7" * 900)])
        screen.step(rl_record(step, reward=-step / 60))
    screen.close()
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    headers = [i for i, line in enumerate(lines) if line.split()[0] == "step"]
    assert len(headers) == 2, "the header comes again after 25 lines"
    titles = "step reward std len ent kl clip% mismatch gnorm tok/s sec ETA"
    assert " ".join(lines[headers[0]].split()) == titles
    row = lines[headers[0] + 1]
    values = "1 -0.017 0.250 6.200 0.412 1e-05 1.3 2e-06 0.770 18k 2.00 3:58"
    assert " ".join(row.split()) == values
    assert len(row) == len(lines[headers[0]])
    assert lines[1] == "held out: accuracy 0.412 +- 0.061 (version 0)"
    assert "best of step 3, reward 1.000 (correct 1.000):" in lines


def test_the_steps_before_a_resume_count():
    out = io.StringIO()
    screen = open_screen("x", 40, out)
    screen.resume([rl_record(step) for step in range(1, 21)], [])
    screen.step(rl_record(21))
    assert out.getvalue().splitlines()[-1].split()[-1] == "0:38"
    assert len(out.getvalue().splitlines()) == 3, "a title, a header and the new step"


def test_a_pipe_gets_plain_lines():
    out = io.StringIO()
    screen = open_screen("x", 40, out)
    assert isinstance(screen, PlainScreen)
    for step in range(1, 22):
        screen.step(rl_record(step))
    assert out.getvalue().splitlines()[-1].split()[-1] == "0:38"
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_the_live_table_and_messages_above_it():
    """A real terminal of 80 columns: a program draws, warns meanwhile, and ends."""
    code = (
        "import sys, logging, os\n"
        "from pentad.telemetry.log import log_to\n"
        "from pentad.telemetry.record import Rl, StepRecord\n"
        "from pentad.telemetry.screen import open_screen, LiveScreen\n"
        "with log_to(os.devnull):\n"
        "    screen = open_screen('x', 3)\n"
        "    assert isinstance(screen, LiveScreen)\n"
        "    for step in (1, 2, 3):\n"
        "        rl = Rl(reward_mean=step / 4)\n"
        "        screen.step(StepRecord(step=step, rl=rl, wall_clock_ms=10.0).as_json())\n"
        "        logging.getLogger('pentad.test').warning('careful %s', 'abc'[step - 1])\n"
        "    screen.close()\n"
    )
    main, side = pty.openpty()
    fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"}
    environment.pop("NO_COLOR", None)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=side, stderr=side, env=environment
    )
    os.close(side)
    seen = b""
    while True:
        try:
            part = os.read(main, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(main)
    assert child.wait(20) == 0, seen.decode()
    text = seen.decode()
    assert "step 3/3" in text and "0.750" in text and "done" in text
    for word in "abc":
        assert f"warning: careful {word}" in text


def test_a_live_screen_draws_on_any_console():
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, legacy_windows=False)
    screen = LiveScreen("x", 2, console)
    screen.step(rl_record(1))
    screen.evaluation(EVALS[0])
    screen.samples([sample("best")])
    screen.close()
    assert "best of step 3" in out.getvalue() and "accuracy 0.412" in out.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (0.5312, "0.531"),
        (-0.5312, "-0.531"),
        (12.345, "12.3"),
        (1234.5, "1234"),
        (18432.0, "18k"),
        (2.5e6, "2.5M"),
        (0.000041, "4e-05"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text
    assert len(text) <= 6


def test_small_parts():
    assert [clock(s) for s in (None, 5, 185, 3723, 100000)] == [
        "-",
        "0:05",
        "3:05",
        "1:02:03",
        "1d 3h",
    ]
    assert one_line("a\tb\x1b[31m", 50) == r"a\tb\x1b[31m", (
        "no control character reaches a terminal"
    )
    assert len(one_line("x" * 500, 74)) <= 74
    assert sparkline([0, 1, 2, 7], ascii_only=True) == "_.-@"
    assert len(sparkline(list(range(1000)))) == 40
    assert sparkline([2.0, 2.0]) == chr(0x2581) * 2, "a flat curve is flat"


def test_plain_lines_have_a_step_before_the_figure_of_its_weights():
    out = io.StringIO()
    screen = PlainScreen("run", 4, out)
    screen.evaluation({"version": 0, "accuracy": 0.1})
    screen.step({"step": 1, "loss": 1.0})
    screen.evaluation({"version": 2, "accuracy": 0.2})  # it is ready before the record of step 2
    screen.step({"step": 2, "loss": 1.0})
    screen.evaluation({"version": 2, "accuracy": 0.3})
    screen.evaluation({"version": 4, "accuracy": 0.4})
    screen.close()
    shown = [line.split() for line in out.getvalue().splitlines()[1:]]
    order = [words[-1].strip(")") if words[0] == "held" else words[0] for words in shown]
    assert [word for word in order if word != "step"] == ["0", "1", "2", "2", "2", "4"]
    assert [words[0] for words in shown if words[0] != "step"][2:4] == ["2", "held"]


def test_turns_of_a_conversation_have_a_line_each():
    turns = [["assistant", "50"], ["user", "too\nhigh"], ["assistant", "42"]]
    sample = {"question": "6*7?", "prompt": "6*7?", "text": "50\n42", "turns": turns}
    assert sample_lines(sample) == ["6*7?", "assistant: 50", "user: too\\nhigh", "assistant: 42"]
    many = [["assistant", str(number)] for number in range(20)]
    shown = sample_lines(sample | {"turns": many})
    assert shown[1:4] == ["assistant: 0", "assistant: 1", "assistant: 2"]
    assert shown[4:] == ["... 16 more", "assistant: 19"]


def test_a_step_under_way_is_shown_until_it_is_recorded():
    picture = Screen("run", 4)
    picture.under_way = "step 1, 11 s: 3 of 8 groups sampled, 4,812 tokens"

    def text():
        console = Console(width=80, file=io.StringIO())
        console.print(draw(picture))
        return console.file.getvalue()

    assert "step 1, 11 s: 3 of 8 groups sampled, 4,812 tokens" in text()
    picture.step({"step": 1, "loss": 1.0})
    assert "groups sampled" not in text()


def test_plain_lines_have_whole_steps_alone():
    out = io.StringIO()
    screen = PlainScreen("run", 4, out)
    screen.progress("step 1, 11 s: 3 of 8 groups sampled")
    assert "sampled" not in out.getvalue()
