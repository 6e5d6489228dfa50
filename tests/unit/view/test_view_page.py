"""The page in a real browser: every view, live records, hostile samples, keys, small screens."""

import os
import re
import time
import urllib.request

import pytest

from pentad_tools.browser import Browser, find_browser
from pentad_tools.pictures import start_view
from tests.unit.view.conftest import sample_line, step_line, write_lines

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium")
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
ROW = "[...document.querySelectorAll('.menu li')].find((one) => one.innerText.includes('trial0'))"


def test_the_page_shows_a_run_and_runs_nothing_of_it(make_run, tmp_path):
    folder = make_run()
    write_lines(folder / "samples.jsonl", [sample_line(20, 3, text=EVIL)])
    spans = [["learner", "train", 0, 900], ["rollout waits", "staleness: batch 2", 100, 300]]
    lines = [{"step": n, "from_s": 1e9 + 2 * n - 1, "spans": spans} for n in range(1, 30)]
    write_lines(folder / "timeline.jsonl", lines)
    other = make_run("other", num_steps=2, rollout={"workflow": "long " * 200})
    write_lines(other / "steps.jsonl", [step_line(3, loss=5.0)])
    pairs = make_run("pairs", num_steps=0)
    figures = {"margin": 0.5, "accuracy": 0.75, "chosen_reward": 1.0, "rejected_reward": 0.5}
    write_lines(pairs / "steps.jsonl", [step_line(n, rl={}, preference=figures) for n in (1, 2)])
    broken = make_run("broken", num_steps=1)
    (broken / "manifest.json").write_text("{")
    for name in ("steps.jsonl", "samples.jsonl", "evals.jsonl"):
        (broken / name).unlink()
    strange = make_run("strange", num_steps=1)  # of another version, and torn
    (strange / "samples.jsonl").write_text('{"step": 1, "text": "old"}\n{"step": 2, "te')
    os.utime(folder / "steps.jsonl", (time.time() + 60,) * 2)  # the newest is shown first
    child, address = start_view([folder.parent])
    try:
        with Browser(PROGRAM) as browser:
            browser.resize(1280, 800)
            browser.open(address)
            browser.wait_for("document.querySelectorAll('.chart canvas').length > 3")
            saves_charts_over_the_same_steps(browser)
            follows_new_lines(browser, make_run, folder)
            answers_what_people_ask(browser, address)
            shows_markup_as_text(browser, address)
            for view, part in (
                ("time", ".lanes .wait"),
                ("samples", ".answer-box"),
                ("overview", ".stat"),
            ):
                is_readable_when_small(browser, f"{address}#/{view}", part)
            is_reached_by_keys(browser, address)
            has_the_charts_of_its_records(browser, address)
            says_what_is_missing(browser, address)
            opens_without_a_server(browser, address, tmp_path / "run.html")
            assert browser.faults() == []
    finally:
        child.end()


def follows_new_lines(browser, make_run, folder):
    """New lines and a new run show, and what was drawn already stays: a link that is replaced while
    it is pressed or has the focus is lost. How soon a line shows: benchmarks/view_large.py."""
    browser.run("document.querySelector('.runs summary').click()")
    browser.run(f"window.row = {ROW}, row.querySelector('a').focus()")
    browser.run(
        "window.kept = [row, document.activeElement, ...document.querySelectorAll('nav a')]"
    )
    make_run("late", num_steps=1)
    for step in (21, 22):
        write_lines(folder / "steps.jsonl", [step_line(step)])
        browser.wait_for(f"document.querySelector('.stat .value').textContent === '{step}'")
    browser.wait_for("row.innerText.includes('step 22')")  # the list of runs was read again
    browser.wait_for("document.querySelector('.menu').innerText.includes('exp/late')")
    assert browser.run("kept.length === 6 && kept.every((one) => one.isConnected)")
    assert browser.run("document.activeElement === kept[1] && kept[1].innerText") == "exp/trial0"


def saves_charts_over_the_same_steps(browser):
    """Steps from 1 on and evaluations from version 0 on: what is in one column is of one step."""
    browser.run("window.saved = {}, window.create = URL.createObjectURL")
    browser.run("URL.createObjectURL = (blob) => ((saved[blob.type] = blob), create(blob))")
    ticks = []
    for chart in ("Reward", "Held-out accuracy"):
        click(browser, f"Save {chart} as SVG")
        text = browser.run("saved['image/svg+xml'].text()")
        assert f">{chart}</text>" in text and text.count("<path") + text.count("<polyline") > 3
        ticks.append(re.findall(r'text-anchor="middle"[^>]*>([^<]*)<', text))
    assert ticks[0] == ticks[1] and len(ticks[0]) > 3
    click(browser, "Save Reward as PNG")
    browser.wait_for("saved['image/png']")
    assert browser.run("saved['image/png'].slice(1, 4).text()") == "PNG"


def answers_what_people_ask(browser, address):
    """By clicks alone: the worst answer of the last step, the slowest step, where two runs part."""
    browser.open("about:blank")
    browser.open(f"{address}#/samples")
    click(browser, "Worst")
    browser.wait_for("document.querySelector('.answer-box.on .pick.worst')")
    click(browser, "Time")
    browser.wait_for("document.querySelector('main').innerText.includes('Slowest: step')")
    browser.run("document.querySelector('.runs summary').click()")
    click(browser, "Compare exp/other")
    browser.wait_for("document.querySelector('main').innerText.includes('part at step 3: loss')")
    widths = "[...document.querySelectorAll('.compared th')].map((one) => one.clientWidth)"
    assert browser.run(f"Math.max(...{widths}) - Math.min(...{widths}) < 3")  # despite a long value
    browser.run("document.querySelectorAll('.menu input:checked')[1].click()")
    browser.wait_for("document.querySelectorAll('.menu input:checked').length === 1")


def click(browser, words):
    """What bears these words."""
    every = "[...document.querySelectorAll('a, button, input')]"
    said = "(one.ariaLabel || one.innerText || '').trim()"
    found = f"{every}.find((one) => {said} === '{words}')"
    browser.wait_for(found)
    browser.run(f"{found}.click()")


def shows_markup_as_text(browser, address):
    browser.open(f"{address}#/samples?step=20")
    browser.wait_for("document.querySelectorAll('.card').length === 4")
    browser.run("document.querySelectorAll('.card')[3].click()")
    browser.wait_for("document.querySelector('.detail').childElementCount > 2")
    assert EVIL in browser.run("document.querySelector('.cards').textContent")
    assert browser.run("window.hacked === undefined && !document.querySelector('main img')")


def is_readable_when_small(browser, address, part):
    browser.set_dark(True)
    browser.resize(390, 800)
    browser.open("about:blank")
    browser.open(address)
    browser.wait_for("document.querySelector('.stat, .card, .meter')")
    if part == ".answer-box":
        browser.run("document.querySelector('.card').click()")
    browser.wait_for(f"document.querySelector('{part}')")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth + 1")
    assert browser.run("document.documentElement.dataset.theme") == "dark"


def is_reached_by_keys(browser, address):
    browser.resize(1280, 800)
    browser.open("about:blank")
    browser.open(address)
    browser.wait_for("document.querySelectorAll('nav a').length >= 3")
    for _ in range(12):
        browser.press("Tab")
        if browser.run("document.activeElement.textContent") == "Time":
            break
    browser.press("Enter")
    browser.wait_for("location.hash.startsWith('#/time')")


def has_the_charts_of_its_records(browser, address):
    """A preference run has margins and no rewards of samples."""
    browser.open("about:blank")
    browser.open(f"{address}#/overview?run=exp~pairs")
    browser.wait_for("document.querySelectorAll('.chart canvas').length > 3")
    titles = browser.run("[...document.querySelectorAll('.chart .title')].map((t) => t.innerText)")
    assert {"Margin", "Preferred answer ranked higher", "Loss"} <= set(titles)
    assert "Reward" not in titles and "Pairs ranked right" in browser.run("document.body.innerText")


def says_what_is_missing(browser, address):
    """Never a blank page."""
    for view, words in (
        ("overview", "manifest.json: missing or being written"),
        ("samples", "samples.jsonl has no samples"),
        ("time", "No step of this run has phases yet"),
    ):
        browser.open("about:blank")
        browser.open(f"{address}#/{view}?run=exp~broken")
        browser.wait_for(f"document.querySelector('main')?.innerText.includes('{words}')")
    browser.open("about:blank")
    browser.open(f"{address}#/samples?run=exp~strange")
    browser.wait_for("document.querySelector('.detail')?.innerText.includes('names no group')")
    browser.wait_for("document.querySelector('.status')?.innerText === '1 sample of step 1'")
    assert not browser.run("/undefined|NaN/.test(document.querySelector('main').innerText)")


def opens_without_a_server(browser, address, path):
    with urllib.request.urlopen(f"{address}export.html?run=exp~trial0") as answer:
        path.write_bytes(answer.read())
    browser.open(f"file://{path}")
    browser.wait_for("document.querySelectorAll('.chart canvas').length > 3")
    browser.open("about:blank")
    browser.open(f"file://{path}#/samples")
    browser.wait_for("document.querySelectorAll('.card').length > 0")
    assert browser.run("window.hacked === undefined")
