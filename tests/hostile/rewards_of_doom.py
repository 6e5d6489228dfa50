"""Reward functions that end in every way that a decoder might not expect."""

import os
import signal


def signal_40(completion):
    os.kill(os.getpid(), 40)


def signal_9(completion):
    os.kill(os.getpid(), signal.SIGKILL)


def beyond_floats(completion):
    return 10**400


def beyond_floats_in_parts(completion):
    return {"a": 1.0, "b": -(10**400)}


def not_finite(completion):
    return float("nan")


def parts_that_overflow(completion):
    return {"a": 1.7e308, "b": 1.7e308}


def deep(completion):
    value = []
    for _ in range(400):
        value = [value]
    return value


def odd_names(completion):
    return {"\x1b[2J": 1.0}


def half_a_pair(completion):
    return "\ud800"


def escapes(completion):
    raise ValueError("\x1b[2J\x1b[1;1H\nerror: forged\u202e")


def endless_text(completion):
    raise ValueError("x" * 10**7)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError


def error_that_raises(completion):
    raise Unspeakable
