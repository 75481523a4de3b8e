"""Words of messages: articles, and lists that are cut short."""

from collections.abc import Sequence
from typing import Any


def with_article(word: str) -> str:
    """Returns a word after "a", or after "an" before a vowel."""
    if word[0] in "AEIOaeio":
        return f"an {word}"
    return f"a {word}"


def list_some(words: Sequence[str], most: int) -> str:
    """Returns words as text, at most so many of them, and how many more there are."""
    return " ".join([", ".join(words[:most]), *and_more(words, most)])


def and_more(items: Sequence[Any], most: int) -> list[str]:
    """Returns the last words of a list that shows only `most` items: "and 3 more", or nothing."""
    if len(items) <= most:
        return []
    return [f"and {len(items) - most} more"]
