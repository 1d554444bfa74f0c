"""From an answer to a typed value: cleaned, then read as words, as a clock's time, or by the grammar.

What always holds: bad text gives None and never raises; time and memory are bounded by MAX_CHARACTERS and the limits
of tokens, grammar and arithmetic; nothing is evaluated that could grow.
"""

import re
from typing import Final

from areal_async.rewards.math import text as cleaning
from areal_async.rewards.math import tokens as lexer
from areal_async.rewards.math.arithmetic import decimal
from areal_async.rewards.math.grammar import Parser
from areal_async.rewards.math.values import EXPRESSIONS, Percent, Quantity, Text, Time, Unreadable, Value

MAX_CHARACTERS: Final = 5_000
LONGEST_PRODUCT: Final = 3  # letters that are more likely variables than a word
_SIMPLE = re.compile(r"([-+]?\d{1,400})(?:\.(\d{1,400}))?\Z", re.ASCII)
_TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?(?: ?([ap])\.? ?m\.?)?\Z", re.ASCII | re.IGNORECASE)
_SHORT_WORDS: Final = frozenset(lexer.words("no on yes off odd not and or one two six ten"))
_LETTER_RUN = re.compile(r"[A-Za-z]{2,6}\Z", re.ASCII)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '’-]+[^\W\d_]+)*[.!]?\Z")


def parse(text: str) -> Value | None:
    """What the text says; None if it can't be read."""
    if len(text) > MAX_CHARACTERS:
        return None
    if simple := _SIMPLE.match(text):
        return decimal(simple[1], simple[2] or "")
    cleaned = cleaning.read(text)
    if not cleaned.text or len(cleaned.text) > MAX_CHARACTERS:
        return None
    value = _worded(cleaned.text) if cleaned.words else _read(cleaned.text)
    if value is None and _WORDS.match(cleaned.text):
        value = _worded(cleaned.text)
    if value is None or cleaned.unit is None or isinstance(value, Text | Percent | Quantity):
        return value
    return Quantity(value, cleaned.unit)


def _worded(text: str) -> Text:
    letters = _mathematics(text) if _LETTER_RUN.match(text) else None
    words = text.rstrip(".!")
    if len(words) > LONGEST_PRODUCT or words.casefold() in _SHORT_WORDS:
        words = words.casefold()  # AB is another product than ab, but Yes is yes
    return Text(words, letters if isinstance(letters, EXPRESSIONS) else None)


def _read(text: str) -> Value | None:
    if simple := _SIMPLE.match(text):
        return decimal(simple[1], simple[2] or "")
    if _LETTER_RUN.match(text) and not lexer.is_named(text):
        return _worded(text)
    if clock := _TIME.match(text):
        parts = tuple(int(part) for part in clock.groups()[:3] if part is not None)
        return Time(parts, f"{clock[4]}m".lower() if clock[4] else "")
    return _mathematics(text)


def _mathematics(text: str) -> Value | None:
    try:
        return Parser(lexer.tokens(text)).whole()
    except Unreadable:
        return None
