"""Text that comes from outside, made fit to be shown: nothing in it steers a terminal."""

from __future__ import annotations


def visible(text: str, keep: str = "") -> str:
    """Characters that a terminal would obey, or not show, as their escapes; except `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def one_line(text: str, limit: int) -> str:
    """One visible line, the middle left out when it is too long."""
    half = (limit - 5) // 2
    if len(text) > 2 * limit:  # most of it will not be shown: do not escape all of it
        text = text[:limit] + text[-limit:]
    line = visible(text.strip())
    return line if len(line) <= limit else f"{line[:half]} ... {line[-half:]}"
