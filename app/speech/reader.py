"""Read a file window by window: decode some of it, look for speech, cut. Blocks; runs in worker threads, one call at a time."""

import time
from collections import deque
from collections.abc import Callable

from app.audio.decode import AudioReader, not_too_loud
from app.speech.vad import FRAME_SAMPLES, VoiceActivity
from app.speech.windows import CutPolicy, Window, WindowCutter

READ_SECONDS = 10.0  # how much is decoded at a time


class SpeechReader:
    """Yields the windows of speech in an audio file, holding no more of it than the window at hand.

    Args:
        audio: the file.
        voice_activity: finds the speech in it.
        policy: where to cut.
        stop: makes a read raise that waits for what is still to arrive.

    """

    def __init__(
        self, audio: AudioReader, voice_activity: VoiceActivity, policy: CutPolicy, *, stop: Callable[[], None] = lambda: None
    ) -> None:
        self._audio = audio
        self._voice_activity = voice_activity
        self._cutter = WindowCutter(audio.rate, policy)
        self._read_samples = int(READ_SECONDS * audio.rate) // FRAME_SAMPLES * FRAME_SAMPLES
        self._found: deque[Window] = deque()
        self._ended = False
        self.stop = stop
        self.decode_seconds = self.vad_seconds = 0.0

    @property
    def seconds(self) -> float:
        """How much audio has been read."""
        return self._audio.seconds

    def next_window(self) -> Window | None:
        """Read on until a window is complete; None when the audio has ended.

        Raises:
            AudioError: if the audio is longer than allowed.

        """
        while not self._found and not self._ended:
            began = time.monotonic()
            samples = self._audio.read(self._read_samples)
            decoded = time.monotonic()
            self.decode_seconds += decoded - began
            self._ended = len(samples) < self._read_samples
            whole = len(samples) // FRAME_SAMPLES * FRAME_SAMPLES
            frames = samples[:whole]
            self._found += self._cutter.feed(frames, self._voice_activity.feed(frames))
            self.vad_seconds += time.monotonic() - decoded
            if self._ended:
                self._found += self._cutter.flush(samples[whole:])
        if not self._found:
            return None
        window = self._found.popleft()
        return Window(window.start, not_too_loud(window.samples))

    def close(self) -> None:
        """Let go of the file."""
        self._audio.close()
