"""Text piece by piece is the text as a whole."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.serve.answers import MAX_WINDOW, TextStream
from pentad.serve.service import as_json


def utf8(ids):
    return bytes(ids).decode(errors="replace")


def by_byte(ids):
    """As decoders with byte fallback do it: broken text has one mark a byte."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "".join(chr(i) if i < 128 else "\ufffd" for i in ids)


def pieces(stream, ids, finish="length"):
    return [*map(stream.push, ids), stream.end(finish)]


@pytest.mark.parametrize("decode", [utf8, by_byte])
def test_no_piece_ends_within_a_character(decode):
    text = "h\u00e4\u20ac \U0001f600!"
    found = pieces(TextStream(decode), text.encode())
    assert "".join(found) == text
    assert all("\ufffd" not in piece for piece in found)
    assert found[:3] == ["h", "", "\u00e4"]


def test_a_character_cut_off_by_the_limit_shows_as_broken():
    assert pieces(TextStream(utf8), "a\u20ac".encode()[:-1]) == ["a", "", "", "\ufffd"]


def expected(ids, finish, stops, stop_ids):
    ended = bool(ids) and ids[-1] in stop_ids
    text = utf8(ids[:-1] if ended else ids)
    if finish == "stop" and not ended:
        places = [text.find(stop) for stop in stops if stop in text]
        text = text[: min(places, default=len(text))]
    return text


@given(
    st.lists(st.sampled_from([*b"abc", 0xC3, 0xA4, 0xE2, 0x82, 0xAC, 0xFF]), max_size=12),
    st.sampled_from(["stop", "length"]),
    st.lists(st.text("abc\u00e4\u20ac", min_size=1, max_size=4), max_size=3),
)
def test_the_pieces_are_the_decoded_text_up_to_the_stop(ids, finish, stops):
    found = pieces(TextStream(utf8, stops), ids, finish)
    assert "".join(found) == expected(ids, finish, stops, ())


def test_what_may_become_a_stop_is_held_back_and_sent_if_it_does_not():
    stream = TextStream(utf8, ["abc", "bd"])
    assert [stream.push(i) for i in b"xababx"] == ["x", "", "", "ab", "", "abx"]
    assert [stream.push(i) for i in b"yabc"] == ["y", "", "", ""]
    assert stream.end("stop") == ""


def test_a_stop_id_has_no_text_whatever_it_spells():
    stream = TextStream(utf8, [], [ord("b")])
    assert pieces(stream, b"aab", "stop") == ["a", "a", "", ""]
    stream = TextStream(utf8, [], [ord("b")])
    assert pieces(stream, [0xE2, 0x82, ord("b")], "stop")[-1] == "\ufffd"


def test_offsets_say_where_tokens_begin():
    stream = TextStream(utf8)
    pieces(stream, "a\u20acb".encode())
    assert stream.offsets == [0, 1, 1, 1, 2]


def test_pieces_depend_on_what_came_before():
    """A decoder that drops the blank before the first word, as sentencepiece models have."""
    words = {1: " the", 2: " cat", 3: "s"}
    decode = lambda ids: "".join(words[i] for i in ids).removeprefix(" ")  # noqa: E731
    assert "".join(pieces(TextStream(decode), [1, 2, 3, 1])) == "the cats the"


def test_endless_garbage_costs_a_bounded_window():
    sizes = []

    def decode(ids):
        sizes.append(len(ids))
        return utf8(ids)

    stream = TextStream(decode)
    assert "".join(pieces(stream, [0xFF] * 1000)) == "\ufffd" * 1000
    assert max(sizes) <= 2 * MAX_WINDOW + 2


@pytest.mark.parametrize("num", [0, 1, 2, 5])
def test_an_answer_encoded_choice_by_choice_is_the_same_json(num):
    choices = [{"index": i, "text": '"choices":[] \u2028 "', "logprobs": None} for i in range(num)]
    body = {"id": 'a"choices":[]b', "choices": choices, "usage": {"choices": []}}
    assert json.loads(as_json(body)) == body
