"""Joining the texts of windows, with any text split in any way; and the bound on work in progress."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.transcript import TextJoiner

# Words of several scripts, and every kind of space: text as an engine says it, piece by piece.
pieces = st.text(alphabet="ab.'é-你好，。ไทยᄀ안😀 \u3000\n\t\u00a0", max_size=6)
windows = st.lists(st.lists(pieces, max_size=5), max_size=5)


def joined(windows: list[list[str]]) -> TextJoiner:
    joiner = TextJoiner()
    for window in windows:
        for piece in window:
            joiner.feed(piece)
        joiner.end_window()
    return joiner


@given(windows)
@example([[" "], [" a"], [], [" ", " b ", " "], [" "]])
def test_what_was_shown_is_the_text_at_every_moment_and_has_no_space_at_its_ends(windows):
    joiner, shown = TextJoiner(), ""
    for window in windows:
        for piece in window:
            shown += joiner.feed(piece)
            assert shown == joiner.text == joiner.text.strip()
        joiner.end_window()
        assert shown == joiner.text
    assert "".join(shown.split()) == "".join("".join(map("".join, windows)).split())


@st.composite
def text_and_its_splits(draw):
    """Draw windows whole, and the same windows split into pieces."""
    whole = draw(st.lists(st.text(alphabet="ab.你ไ안 \u3000\n", max_size=12), max_size=4))
    split = []
    for text in whole:
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
        split.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return whole, split


@given(text_and_its_splits())
def test_however_a_text_is_split_into_pieces_it_is_the_same(case):
    whole, split = case
    assert joined(split).text == joined([[text] for text in whole]).text


@given(st.text(alphabet="ab c\n你 ", max_size=20))
def test_within_a_window_the_text_is_left_as_it_is(text):
    assert joined([[text]]).text == text.strip()


@given(windows)
def test_a_seam_never_gets_a_second_space(windows):
    texts = ["".join(window).strip() for window in windows]
    text = joined(windows).text
    position = 0
    for number, window in enumerate(filter(None, texts)):
        if number and text[position] == " ":
            position += 1
        assert text[position:].startswith(window)
        position += len(window)
    assert position == len(text)


words = st.text(alphabet="abcdefé'-0", min_size=1, max_size=8)


@given(
    st.lists(words, min_size=1, max_size=8),
    st.sampled_from(["", " ", "  "]),
    st.sampled_from(["", " "]),
    st.sampled_from([0, 1, 2]),
)
def test_words_of_two_windows_are_one_space_apart(words, before, after, empty_windows):
    windows = [[before + word + after] for word in words]
    for number in range(len(words), 0, -1):
        windows[number:number] = [[]] * empty_windows
    assert joined(windows).text == " ".join(words)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("this", "is", "this is"),
        ("this ", " is", "this is"),
        ("this.", "Is", "this. Is"),
        ("你好", "世界", "你好世界"),
        ("你好。", "世界", "你好。世界"),
        ("你好，", " 世界", "你好，世界"),
        ("こんにちは", "カタカナ", "こんにちはカタカナ"),
        ("สวัสดี", "ครับ", "สวัสดีครับ"),
        ("ສະບາຍ", "ດີ", "ສະບາຍດີ"),
        ("မြန်မာ", "စာ", "မြန်မာစာ"),
        ("ភាសា", "ខ្មែរ", "ភាសាខ្មែរ"),
        ("hello", "世界", "hello 世界"),
        ("世界", "hello", "世界 hello"),
        ("안녕하세요", "여러분", "안녕하세요 여러분"),
        ("hello", "안녕", "hello 안녕"),
    ],
)
def test_a_seam_has_a_space_unless_the_script_has_none(first, second, text):
    assert joined([[first], [second]]).text == text


@pytest.mark.parametrize("silence", [[], [""], [" "], [" ", "\n", " "]])
def test_a_window_without_words_adds_nothing(silence):
    assert joined([silence, silence]).text == ""
    assert joined([silence, [" one"], silence, [" two"], silence]).text == "one two"


def test_a_space_is_held_back_until_a_word_follows():
    joiner = TextJoiner()
    assert [joiner.feed(piece) for piece in (" one", " ", " ", "two ", "")] == ["one", "", "", "  two", ""]
