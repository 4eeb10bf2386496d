"""The samples that a session keeps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.audio.buffer import SampleBuffer

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 40_000)),
        st.tuples(st.just("drop"), st.floats(-0.5, 1.5)),
        st.tuples(st.just("cut"), st.floats(0, 1)),
    ),
    max_size=40,
)


@given(steps=STEPS)
def test_what_is_cut_out_is_what_came_and_stays_so(steps: list[tuple[str, float]]) -> None:
    buffer, all_of_it, start, end = SampleBuffer(), np.arange(40 * 40_000, dtype=np.float32), 0, 0
    views = []
    for what, value in steps:
        match what:
            case "append":
                buffer.append(all_of_it[end : end + int(value)])
                end += int(value)
            case "drop":
                position = start + int(value * (end - start))
                buffer.drop_before(position)
                start = min(max(start, position), end)
            case "cut":
                first = start + int(value * (end - start))
                views.append((first, end, buffer.cut_out(first, end)))
        assert len(buffer) == end - start
    for first, last, view in views:
        np.testing.assert_array_equal(view, all_of_it[first:last])


def test_a_view_is_not_to_be_written_into() -> None:
    buffer = SampleBuffer()
    buffer.append(np.ones(100, dtype=np.float32))
    assert not buffer.cut_out(0, 100).flags.writeable


def test_a_long_stream_is_kept_in_little_memory() -> None:
    buffer = SampleBuffer()
    for _ in range(10_000):
        buffer.append(np.zeros(1600, dtype=np.float32))
        buffer.drop_before(buffer._end - 8000)
    assert buffer._piece.nbytes <= 4 * 4 * 16_000
