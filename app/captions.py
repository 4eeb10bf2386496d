"""Subtitles from segments: SubRip (srt) and WebVTT. Pure.

Times are rounded to whole milliseconds first, and taken apart after: 0.9996 s is 1,000 ms, and so the next second.
"""

from collections.abc import Iterable

from app.transcript import Segment


def srt(segments: Iterable[Segment]) -> str:
    """Write SubRip: numbered cues, a comma before the milliseconds."""
    return "".join(
        f"{number}\n{_time(s.start, ',')} --> {_time(s.end, ',')}\n{_cue_text(s.text)}\n\n"
        for number, s in enumerate(segments, 1)
    )


def vtt(segments: Iterable[Segment]) -> str:
    """Write WebVTT: a header, a point before the milliseconds."""
    cues = (f"{_time(s.start, '.')} --> {_time(s.end, '.')}\n{_cue_text(s.text)}\n\n" for s in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _time(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{point}{milliseconds:03}"


def _cue_text(text: str) -> str:
    """Keep a text from ending its cue (an empty line) or looking like a cue's times."""
    return " ".join(text.split()).replace("-->", "->")
