"""Tools of rows and workflows in the text that the model sees, and where they would be left out."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sections import data_source

from pentad.core.errors import UserError
from pentad.data.prompts import RejectedPrompt, open_prompts
from pentad.data.sft import open_sft
from pentad.data.tokenizer import load_tokenizer
from pentad.serve.jobs import chat_ids, read_conversation
from pentad.serve.wire import read_chat

TOOLS_HEAD = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}"
TOOLS_HEAD += "<|im_end|>\n{% endif %}"
ONE_ONLY = "{% if tools %}{{ tools[0] | tojson }}{% endif %}"
HISTORY = "{% if tools and not add_generation_prompt %}{{ tools | length }}{% endif %}"


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    described = {"name": name, "description": f"does {name}", "parameters": parameters}
    return {"type": "function", "function": described}


ADD, SEARCH = tool("add", a={"type": "integer"}, b={"type": "integer"}), tool("search")
USER, SAID = {"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}


def with_template(folder, head):
    """A tokenizer whose template writes `head` before the messages."""
    tokenizer = load_tokenizer(folder)
    tokenizer.inner.chat_template = head + tokenizer.inner.chat_template
    return tokenizer


@pytest.fixture(scope="module")
def shows(chat_folder):
    return with_template(chat_folder, TOOLS_HEAD)


def settings(path, **columns):
    given = {"messages_key": "m", **columns}
    return data_source(path=str(path), shuffle=False, **given)


def write(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def seen_by_prompts(path, tokenizer, **columns):
    stream = open_prompts(settings(path, **columns), tokenizer)
    ids = stream.prompt(0).ids
    assert tokenizer.decode(ids, keep_special=True) == stream.prompt(0).text
    return tokenizer.decode(ids, keep_special=True)


def seen_by_sft(path, tokenizer, **columns):
    """The context of the first example, and what is trained."""
    ((row,)) = open_sft(settings(path, **columns), tokenizer).example(0)
    trained = row.columns["weights"].bool()
    ids = row.ids.tolist()
    start = trained.tolist().index(True)
    assert trained[start:].any() and not trained[:start].any()
    return tokenizer.decode(ids[:start], keep_special=True)


SHAPES = {
    "a list": [ADD, SEARCH],
    "JSON text": json.dumps([ADD, SEARCH]),
}


@pytest.mark.parametrize("value", SHAPES.values(), ids=SHAPES)
def test_prompts_examples_and_requests_show_the_same_tools(shows, tmp_path, value):
    expected = shows.render([USER], for_answer=True, tools=[ADD, SEARCH])
    assert '"add"' in expected and '"search"' in expected
    prompts = write(tmp_path, {"m": [USER], "tools": value})
    assert seen_by_prompts(prompts, shows) == expected
    examples = write(tmp_path, {"m": [USER, SAID], "tools": value})
    assert seen_by_sft(examples, shows) == expected
    body = read_chat({"model": "m", "messages": [USER], "tools": [ADD, SEARCH]})
    asked = chat_ids(read_conversation(body, shows), shows)
    assert shows.decode(asked, keep_special=True) == expected


def test_columnar_files_show_the_tools_of_each_row_alone(shows, tmp_path):
    """Parquet fills what the tool of another row has with null."""
    find = tool("find", q={"enum": ["x"]})
    rows = [{"m": [USER], "tools": tools} for tools in ([ADD], [find], None)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    stream = open_prompts(settings(path), shows)
    texts = [stream.prompt(gid).text for gid in range(3)]
    assert texts[0] == shows.render([USER], for_answer=True, tools=[ADD])
    assert "find" in texts[1] and "null" not in texts[1] and '"a"' not in texts[1]
    assert texts[2] == shows.render([USER], for_answer=True)


def test_every_turn_of_an_example_is_rendered_with_the_tools(shows, tmp_path):
    """The borders are those of the whole text, and the answers alone are trained."""
    messages = [USER, SAID, USER, {"role": "assistant", "content": "still 3"}]
    path = write(tmp_path, {"m": messages, "tools": [ADD]})
    ((row,)) = open_sft(settings(path), shows).example(0)
    whole = shows.render(messages, for_answer=False, tools=[ADD])
    assert whole.startswith(shows.decode(row.ids.tolist(), keep_special=True))
    trained = row.ids[row.columns["weights"].bool()].tolist()
    assert shows.decode(trained) == "3still 3"


def test_the_tools_of_a_workflow_come_before_those_of_a_row(shows, tmp_path):
    path = write(tmp_path, {"m": [USER], "tools": [SEARCH]})
    expected = shows.render([USER], for_answer=True, tools=[ADD, SEARCH])
    assert seen_by_prompts(path, shows, tools=(ADD,)) == expected


def test_rows_without_tools_and_other_columns_are_rendered_as_ever(shows, tmp_path):
    plain = shows.render([USER], for_answer=True)
    for row in ({}, {"tools": None}, {"tools": []}, {"tools": ""}):
        assert seen_by_prompts(write(tmp_path, {"m": [USER], **row}), shows) == plain
    other = write(tmp_path, {"m": [USER], "tools": ["hammer"], "functions": [ADD]})
    assert seen_by_prompts(other, shows, tools_key=None) == plain
    expected = shows.render([USER], for_answer=True, tools=[ADD])
    assert seen_by_prompts(other, shows, tools_key="functions") == expected


BAD = {
    "names": (["add"], "not a list of objects with type = function"),
    "no type": ([{"function": {"name": "x"}}], "not a list of objects with type = function"),
    "no name": ([{"type": "function", "function": {}}], "not a list of objects"),
    "an object": (ADD, "not a list of objects"),
    "a number": (7, "not a list of objects"),
    "broken JSON": ('[{"type": ', "text that is not JSON"),
    "endless JSON": ("[" * 100_000, "text that is not JSON"),
    "JSON of another kind": ("3", "not a list of objects"),
    "the same name twice": ([ADD, ADD], 'the tool "add" is given twice'),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_list_of_tools_is_refused_with_its_row(shows, tmp_path, kind):
    value, sentence = BAD[kind]
    for opening, messages in ((open_prompts, [USER]), (open_sft, [USER, SAID])):
        path = write(tmp_path, {"m": messages, "tools": value})
        with pytest.raises(UserError, match=sentence) as caught:
            opening(settings(path), shows)
        assert "rows.jsonl:1" in str(caught.value)


TEMPLATES = {
    "none of them": ("", "add, search"),
    "the first alone": (ONE_ONLY, "search"),
    "how many there are, and late": (HISTORY, "add, search"),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_that_leaves_tools_out_is_refused_at_the_start(chat_folder, tmp_path, kind):
    head, hidden = TEMPLATES[kind]
    tokenizer = with_template(chat_folder, head)
    rule = rf"the chat template in .* does not show the row's tools \({hidden}\).*tools_key: null"
    for opening, messages in ((open_prompts, [USER]), (open_sft, [USER, SAID])):
        path = write(tmp_path, {"m": messages, "tools": [ADD, SEARCH]})
        with pytest.raises(UserError, match=rule):
            opening(settings(path), tokenizer)
    path = write(tmp_path, {"m": [USER]})
    with pytest.raises(UserError, match="does not show tools, and the workflow has add, search"):
        open_prompts(settings(path, tools=(ADD, SEARCH)), tokenizer)


def test_streamed_rows_are_refused_as_they_come(chat, tmp_path):
    path = write(tmp_path, {"m": [USER], "tools": [ADD]}, {"m": [USER]})
    given = data_source(path=str(path), messages_key="m", shuffle=False, streaming=True)
    stream = open_prompts(given, chat)
    with pytest.raises(RejectedPrompt, match="does not show the row's tools"):
        stream.prompt(0)
    assert stream.prompt(1).ids


def test_tools_beside_plain_text_are_not_passed_over_in_silence(shows, tmp_path):
    path = write(tmp_path, {"prompt": "1+2", "response": "3", "tools": [ADD]})
    for opening in (open_prompts, open_sft):
        (warning,) = opening(settings(path, messages_key=None), shows).warnings
        assert "plain text does not show" in warning and "chat_template: true" in warning
        assert not opening(settings(path, messages_key=None, tools_key=None), shows).warnings
    with pytest.raises(UserError, match=r"the workflow has tools \(add\), which only the chat"):
        open_prompts(settings(path, messages_key=None, tools=(ADD,)), shows)
