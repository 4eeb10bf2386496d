"""Windows taken apart at their timestamps."""

import pytest

from engine.prompts import TokenLayout
from engine.segments import split_segments

LAYOUT = TokenLayout.of_vocabulary(51_865)


def at(seconds: float) -> int:
    return LAYOUT.timestamp_begin + round(seconds / 0.02)


def split(tokens: list[int], seconds: float = 30.0) -> list[tuple[float, float, str]]:
    segments = split_segments(
        tokens,
        [-0.1 * i for i in range(len(tokens))],
        layout=LAYOUT,
        seconds=seconds,
        detokenize=lambda ids: " ".join(map(str, ids)),
        spell=lambda token: b"%d" % token,
    )
    assert all(len(s.tokens) == len(s.logprobs) for s in segments)
    return [(round(s.start, 2), round(s.end, 2), s.text) for s in segments]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([at(0), 11, 12, at(2.5), at(2.5), 13, at(4.04)], [(0, 2.5, "11 12"), (2.5, 4.04, "13")]),
        ([at(0.5), 11, at(2), at(6), 12, at(8)], [(0.5, 2, "11"), (6, 8, "12")]),  # silence between
        ([at(0), 11, at(2), at(2), 12], [(0, 2, "11"), (2, 9, "12")]),  # the last one is left open
        ([at(0), at(3), at(3), 11, at(4)], [(3, 4, "11")]),  # nothing between two times
        ([11, 12], [(0, 9, "11 12")]),  # no times at all
        ([at(1), 11, at(29)], [(1, 9, "11")]),  # a time past the audio
        ([at(20), 11, at(29)], [(9, 9, "11")]),
        ([at(0), 11, at(2)], [(0, 2, "11")]),
    ],
)
def test_segments(tokens: list[int], expected: list[tuple[float, float, str]]):
    assert split(tokens, seconds=9.0) == expected


def test_the_log_probabilities_stay_with_their_tokens():
    tokens = [at(0), 11, 12, at(2), at(2), 13]
    one, two = split_segments(
        tokens, [0, -1, -2, 0, 0, -3], layout=LAYOUT, seconds=9, detokenize=str, spell=lambda token: b"%d" % token
    )
    assert (one.spelling, two.spelling) == ((b"11", b"12"), (b"13",))
    assert (one.tokens, one.logprobs, two.tokens, two.logprobs) == ((11, 12), (-1, -2), (13,), (-3,))
