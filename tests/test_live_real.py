"""Live sessions on the real engine, spoken to in real time."""

import threading
import time

import jiwer
import pytest
from whisper.normalizers import EnglishTextNormalizer

from tests import speech
from tests.gateway import Gateway, wait_until
from tests.test_live_wire import Duplex, s16le
from tests.test_real import real
from tests.test_sessions import Held, told

FRAME_SECONDS = 0.1


def paced(seconds: float, started: float) -> None:
    """Wait until so many seconds have passed since the start."""
    threading.Event().wait(max(0.0, started + seconds - time.monotonic()))


@real(4)
def test_text_comes_while_somebody_speaks_and_is_what_the_file_says(real_gateway: Gateway):
    clip = speech.two_cities()
    samples = clip.audio.samples
    create = real_gateway.client().audio.transcriptions.create
    file_text = create(model="whisper-1", file=speech.wav(samples), language="en").text
    client = Duplex(real_gateway, language="en", **{"include[]": "profile"})
    sent = 0.0

    def send() -> None:
        nonlocal sent
        started, frame = time.monotonic(), round(FRAME_SECONDS * speech.RATE)
        for i in range(0, len(samples), frame):
            paced(i / speech.RATE, started)
            client.send(s16le(samples[i : i + frame]))
            sent = (i + frame) / speech.RATE
        client.end()

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    client.read_until(b'"transcript.text.delta"')
    sent_at_first = sent
    events = client.events()
    sending.join()
    *deltas, done, end = events
    assert end == "[DONE]"
    assert "".join(event["delta"] for event in deltas) == done["text"]
    profile = done["profile"]
    print(f"\nfirst text with {sent_at_first:.1f} of {len(samples) / speech.RATE:.1f} s sent; {profile}")
    assert sent_at_first < len(samples) / speech.RATE / 2
    normalise = EnglishTextNormalizer()
    rates = [jiwer.wer(normalise(clip.words), normalise(text)) for text in (file_text, done["text"])]
    print(f"WER of the file {rates[0]:.3f}, live {rates[1]:.3f}")
    assert rates[1] <= rates[0] + 0.03


@real(25)
def test_a_reader_that_drops_twice_misses_nothing_and_the_text_is_right(real_gateway: Gateway):
    clip = speech.beckett()
    samples = clip.audio.samples
    held = Held(real_gateway, language="en", include=["partials"], endpointing="server")
    got: list = []

    def read() -> None:
        for at_most in (2, 3, None):
            got.extend(held.events(got[-1][0] if got else None, at_most=at_most))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    started, frame = time.monotonic(), speech.RATE // 4
    for i in range(0, len(samples), frame):
        paced(i / speech.RATE, started)
        held.post(samples[i : i + frame])
    held.http.post(f"{held.path}/stop")
    reading.join(300)
    assert [number for number, _ in got] == list(range(1, len(got) + 1))
    done = got[-1][1]
    assert done["type"] == "transcript.text.done"
    assert told(got) == done["text"]
    assert jiwer.wer(" ".join(speech.words(clip.words)), " ".join(speech.words(done["text"]))) <= 0.2


@real(26)
def test_a_session_never_sees_what_was_said_in_another(real_gateway: Gateway):
    """Probe G15: the first client commits and leaves at once."""
    first = Held(real_gateway, language="en", endpointing="client")
    first.post(speech.two_cities().audio.samples[: 5 * speech.RATE])
    first.http.post(f"{first.path}/commit")
    first.http.delete(first.path)
    second = Held(real_gateway, language="en", endpointing="client")
    second.post(speech.beckett().audio.samples)
    second.http.post(f"{second.path}/stop")
    text = " ".join(speech.words(told(second.events())))
    assert "fail better" in text
    assert "times" not in text
    assert first.body["id"] != second.body["id"]


@real(27)
@pytest.mark.parametrize("moment", [0.0, 0.7, 1.9, 4.1])
def test_a_client_that_vanishes_frees_the_engine(real_gateway: Gateway, moment: float):
    client = Duplex(real_gateway, language="en")
    samples, started = speech.two_cities().audio.samples, time.monotonic()
    for i in range(0, int(moment * speech.RATE), 1600):
        paced(i / speech.RATE, started)
        client.send(s16le(samples[i : i + 1600]))
    client.vanish()
    wait_until(lambda: real_gateway.engine.requests == 0 and not real_gateway.services.live.open)
