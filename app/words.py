"""Words and their times, from tokens and theirs. Pure.

A token may be part of a word, or of a character. Words follow the language: between spaces, or character by character where the
script has none; punctuation belongs to the word beside it (openai-whisper, `split_to_word_tokens` and `merge_punctuations`).
"""

import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNSPACED_LANGUAGES = {"zh", "ja", "th", "lo", "my", "yue"}
OPENING = "\"'“¿([{-"
CLOSING = "\"'.。,，!！?？:：”)]}、"


@dataclass(frozen=True, slots=True)
class Word:
    """A word as it stands in the text, with its punctuation and without spaces around it; times in seconds."""

    text: str
    start: float
    end: float


@dataclass(slots=True)
class _Piece:
    text: str
    first: int  # its tokens: from this one
    last: int  # up to before this one


def text_of(spelling: Iterable[bytes]) -> str:
    """Join tokens' bytes into text."""
    return b"".join(spelling).decode(errors="replace")


def word_ends(spelling: Sequence[bytes], language: str | None) -> list[int]:
    """Say after how many tokens each word ends, its punctuation included. The last word may still be growing."""
    if not spelling:
        return []
    return [*(piece.first for piece in _words(spelling, language)[1:]), len(spelling)]


def words_of(spelling: Sequence[bytes], times: Sequence[float], language: str | None) -> list[Word]:
    """Group tokens into words.

    Args:
        spelling: the tokens' bytes.
        times: when each token begins and, last, when the last one ends, in seconds.
        language: a code; decides where words part.

    """
    return [
        Word(piece.text.strip(), float(times[piece.first]), float(times[piece.last]))
        for piece in _words(spelling, language)
        if piece.text.strip()
    ]


def _words(spelling: Sequence[bytes], language: str | None) -> list[_Piece]:
    pieces = _whole_characters(spelling)
    if language not in UNSPACED_LANGUAGES:
        pieces = _joined_between_spaces(pieces)
    return _with_punctuation(pieces)


def _whole_characters(spelling: Sequence[bytes]) -> list[_Piece]:
    pieces, held, first = [], b"", 0
    for i, piece in enumerate(spelling):
        held += piece
        try:
            text = held.decode()
        except UnicodeDecodeError:
            if i + 1 < len(spelling):
                continue
            text = held.decode(errors="replace")
        pieces.append(_Piece(text, first, i + 1))
        held, first = b"", i + 1
    return pieces


def _joined_between_spaces(pieces: list[_Piece]) -> list[_Piece]:
    words: list[_Piece] = []
    for piece in pieces:
        if not words or piece.text.startswith(" ") or piece.text.strip() in string.punctuation:
            words.append(piece)
        else:
            words[-1] = _Piece(words[-1].text + piece.text, words[-1].first, piece.last)
    return words


def _with_punctuation(pieces: list[_Piece]) -> list[_Piece]:
    """Give opening marks to the word after them, closing marks to the word before; its times stay its own."""
    opened: list[_Piece] = []
    for piece in reversed(pieces):
        follows = opened and piece.text.startswith(" ") and piece.text.strip() in OPENING and piece.text.strip()
        if follows:
            after = opened.pop()
            piece = _Piece(piece.text + after.text.lstrip(), after.first, after.last)  # noqa: PLW2901
        opened.append(piece)
    words: list[_Piece] = []
    for piece in reversed(opened):
        if words and piece.text and piece.text in CLOSING and not words[-1].text.endswith(" "):
            words[-1] = _Piece(words[-1].text + piece.text, words[-1].first, words[-1].last)
        else:
            words.append(piece)
    return words
