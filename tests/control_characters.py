"""A text that drives a terminal, and the check that none is printed."""

import re

# It would set the window's title, colour the text after it, turn it around, and begin a line.
MARK = "中文\x1b]0;pwn\x07\x9b31m\u202e\r\nforged"
WRITTEN = r"中文\x1b]0;pwn\x07\x9b31m\u202e\r\nforged"


def check_printed(text):
    """Raise if a text has control characters other than the ends of its own lines."""
    assert {char for char in text if not char.isprintable()} <= {"\n"}, repr(text)
    assert not re.search("^forged", text, re.MULTILINE)
