"""Live sessions on the scripted engine: text while the audio comes, bounds, places, and nothing left behind."""

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from app.admission import Admission, Permit
from app.cores import Cores
from app.errors import InvalidInputError, StenoError, TranscriptionFailedError, UnavailableError
from app.live import LivePolicy, LiveSession, LiveSessions
from app.live_events import LiveDelta, LivePartial, UtteranceChanged, UtteranceClosed, UtteranceFinal, UtteranceOpened
from app.metrics import Metrics
from app.session.agreement import AgreementPolicy
from app.speech.endpointing import Endpointer, EndpointPolicy
from app.speech.vad import FRAME_SAMPLES
from app.transcript import Options, Transcript
from engine.base import DecodeRequest
from engine.fake import FakeEngine, Reply

RATE = 16_000
WORD = 3200  # samples: somebody says five words a second, and each sample tells which
PERMITS = Admission(1000)
STEP = 1e-4


class LoudIsSpeech:
    """Voice activity: what is not nothing is speech."""

    def feed(self, samples: np.ndarray) -> np.ndarray:
        return (np.abs(samples.reshape(-1, FRAME_SAMPLES)).max(axis=1) > 0).astype(np.float32)


def words_in(samples: np.ndarray) -> list[str]:
    """Read the words off their samples: all that are there to their half."""
    numbers, counts = np.unique(np.round(samples / STEP).astype(int), return_counts=True)
    return [f" w{number}" for number, count in zip(numbers, counts, strict=True) if number and count > WORD // 2]


def saying(first: int, last: int) -> np.ndarray:
    """Say the words from `first` to `last`."""
    return np.repeat(np.arange(first, last + 1), WORD).astype(np.float32) * np.float32(STEP)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * RATE), dtype=np.float32)


def reads(request: DecodeRequest) -> Reply:
    return Reply(tuple(words_in(request.samples)))


def sessions_on(engine: FakeEngine, **policy) -> LiveSessions:
    chosen = LivePolicy(**({"agreement": AgreementPolicy(2)} | policy))
    return LiveSessions(engine, voice_activity=LoudIsSpeech, cores=Cores(2), policy=chosen, metrics=Metrics())


def start(sessions: LiveSessions, *, endpoints: EndpointPolicy | None = None, options: Options | None = None) -> LiveSession:
    permit = Permit(1, "", "live", PERMITS)
    return sessions.start(permit, options or Options(), request_id="t", endpoints=endpoints)


async def run(
    session: LiveSession, audio: np.ndarray, *, chunk: int = 1600, between: Callable[[int], Awaitable[None]] | None = None
) -> list:
    """Feed a session while its events are read, as fast as it takes it; return the events."""

    async def feed() -> None:
        for i in range(0, len(audio), chunk):
            await session.feed(audio[i : i + chunk])
            if between:
                await between(i)
            await asyncio.sleep(0)
        session.stop()

    feeding = asyncio.create_task(feed())
    async with aclosing(session.events()) as events:
        heard = [event async for event in events]
    await feeding
    return heard


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.001)


async def settled(engine: FakeEngine) -> None:
    """Let the engine's requests come to their end."""
    await until(lambda: engine.requests == 0)


async def listen(session: LiveSession, told: list) -> None:
    async for event in session.events():
        told.append(event)


def assert_deltas_join(events: list) -> Transcript:
    transcript = events[-1]
    assert isinstance(transcript, Transcript)
    assert "".join(event.text for event in events if isinstance(event, LiveDelta)) == transcript.text
    return transcript


@pytest.mark.parametrize("endpoints", [None, EndpointPolicy()], ids=["client", "server"])
async def test_words_come_while_they_are_said_and_all_of_them_once(endpoints: EndpointPolicy | None):
    async with FakeEngine(reads) as engine:
        await engine.wait_ready()
        session = start(sessions_on(engine), endpoints=endpoints)
        told_at: list[float] = []

        async def listen(_: int) -> None:
            await settled(engine)
            told_at.append(session.seconds if session.profile.first_text is not None else 0)

        events = await run(session, saying(1, 40), between=listen)
    transcript = assert_deltas_join(events)
    assert transcript.text.split() == [f"w{i}" for i in range(1, 41)]
    assert transcript.seconds == 8.0
    assert min(seconds for seconds in told_at if seconds) <= 1.6  # of eight seconds
    assert engine.requests == 0
    assert session.profile.words_taken_back == 0


async def test_partials_tell_what_is_not_certain_yet_and_never_contradict_the_deltas():
    async with FakeEngine(reads) as engine:
        await engine.wait_ready()

        async def wait(_: int) -> None:
            await settled(engine)

        events = await run(start(sessions_on(engine)), saying(1, 20), between=wait)
    told, revision = "", 0
    for event in events:
        if isinstance(event, LiveDelta):
            told += event.text
        elif isinstance(event, LivePartial):
            assert event.revision == revision + 1
            revision = event.revision
            words = (told + " " + event.text).split()
            assert words == [f"w{i}" for i in range(1, len(words) + 1)]
            # Of audio that ends in its middle no word is heard, of one that begins there none is lost.
            assert len(words) == int(event.seconds * RATE) // WORD
    assert revision > 5


async def test_an_utterance_is_told_of_when_it_opens_closes_and_is_final():
    audio = np.concatenate([silence(1.0), saying(1, 10), silence(3.0), saying(11, 20), silence(3.0)])
    async with FakeEngine(reads) as engine:
        await engine.wait_ready()
        events = await run(start(sessions_on(engine), endpoints=EndpointPolicy()), audio)
    transcript = assert_deltas_join(events)
    assert transcript.text.split() == [f"w{i}" for i in range(1, 21)]
    opened = [event.start for event in events if isinstance(event, UtteranceOpened)]
    closed = [event.end for event in events if isinstance(event, UtteranceClosed)]
    assert opened == pytest.approx([0.6, 5.6], abs=0.04)  # a little before the speech
    assert closed == pytest.approx([3.4, 8.4], abs=0.04)  # and a little after it
    finals = [event for event in events if isinstance(event, UtteranceFinal)]
    assert [(f.segment.start, f.segment.end) for f in finals] == list(zip(opened, closed, strict=True))
    assert [s.text.split()[0] for s in transcript.segments] == ["w1", "w11"]


async def test_silence_costs_nothing_and_says_nothing():
    async with FakeEngine(reads) as engine:
        await engine.wait_ready()
        events = await run(start(sessions_on(engine), endpoints=EndpointPolicy()), silence(20.0))
    assert not engine.submitted
    assert [type(event) for event in events] == [Transcript]
    assert events[-1].text == ""


async def test_one_partial_is_in_flight_and_the_newest_audio_goes_next():
    most = 0

    def slow(request: DecodeRequest) -> Reply:
        nonlocal most
        most = max(most, engine.requests)
        return replace(reads(request), first_seconds=0.05)

    async with FakeEngine(slow) as engine:
        await engine.wait_ready()

        async def pace(_: int) -> None:
            await asyncio.sleep(0.005)

        events = await run(start(sessions_on(engine)), saying(1, 60), between=pace)
    assert most == 1
    partials = [request for request in engine.submitted if request.priority]
    assert len(partials) <= 14  # of 23 that were due: those between were never decoded
    lengths = [len(request.samples) for request in partials]
    assert lengths == sorted(lengths)
    assert assert_deltas_join(events).text.split() == [f"w{i}" for i in range(1, 61)]


async def test_a_commit_closes_after_the_last_sample_and_each_sample_is_in_one_final():
    chance, audio = random.Random(5), saying(1, 100)
    async with FakeEngine(reads) as engine:
        await engine.wait_ready()
        session = start(sessions_on(engine))
        commits = []

        async def commit(i: int) -> None:
            if chance.random() < 0.1:
                await session.commit()
                commits.append(min(i + 700, len(audio)))

        await run(session, audio, chunk=700, between=commit)
    finals = sorted((r for r in engine.submitted if not r.priority), key=lambda r: r.samples[0])
    assert np.array_equal(np.concatenate([request.samples for request in finals]), audio)
    ends = np.cumsum([len(request.samples) for request in finals])
    assert list(ends) == [*commits, len(audio)] or list(ends) == commits


async def test_speech_without_a_pause_is_cut_within_the_window_and_no_sample_is_lost():
    audio = saying(1, 500)  # 100 s
    async with FakeEngine(reads) as engine:
        await engine.wait_ready()
        events = await run(start(sessions_on(engine), endpoints=EndpointPolicy()), audio)
    finals = sorted((r for r in engine.submitted if not r.priority), key=lambda r: r.samples[0])
    assert np.array_equal(np.concatenate([request.samples for request in finals]), audio)
    assert 4 <= len(finals) <= 6
    assert max(len(request.samples) for request in engine.submitted) <= 480_000
    assert_deltas_join(events)


async def test_a_piece_may_be_longer_than_an_utterance_may_be():
    audio = np.concatenate([silence(1.0), saying(1, 215), silence(3.0), saying(216, 230), silence(3.0)])
    heard = []
    async with FakeEngine(reads) as engine:
        await engine.wait_ready()
        for chunk in (1600, len(audio)):
            engine.submitted.clear()
            events = await run(start(sessions_on(engine), endpoints=EndpointPolicy()), audio, chunk=chunk)
            heard.append(assert_deltas_join(events).text.split())
            assert max(len(request.samples) for request in engine.submitted) <= 480_000
    assert heard[0] == heard[1] == [f"w{i}" for i in range(1, 231)]


async def test_finals_of_a_session_wait_for_each_other():
    most = 0

    def script(request: DecodeRequest) -> Reply:
        nonlocal most
        most = max(most, engine.requests)
        return replace(reads(request), first_seconds=0.01)

    async with FakeEngine(script) as engine:
        await engine.wait_ready()
        session = start(sessions_on(engine, first_seconds=1000.0))

        async def commit(_: int) -> None:
            await session.commit()

        events = await run(session, saying(1, 30), chunk=WORD, between=commit)
    assert assert_deltas_join(events).text.split() == [f"w{i}" for i in range(1, 31)]
    assert most == 2


@pytest.mark.parametrize(
    ("multilingual", "language", "from_the_start"), [(True, "en", True), (False, None, True), (True, None, False)]
)
async def test_partials_have_the_prompt_unless_it_would_sway_which_language_is_heard(
    multilingual: bool, language: str | None, from_the_start: bool
):
    async with FakeEngine(reads, multilingual=multilingual) as engine:
        await engine.wait_ready()
        session = start(sessions_on(engine), options=Options(prompt="Steno", language=language))
        await run(session, saying(1, 20), chunk=WORD, between=lambda _: settled(engine))
    with_prefix = [request.previous_text for request in engine.submitted if request.prefix]
    assert with_prefix
    assert set(with_prefix) == {"Steno"}  # what is confirmed has told the language
    without = [request.previous_text for request in engine.submitted if not request.prefix]
    assert len(without) > 1
    assert set(without) == {"Steno" if from_the_start else ""}


async def test_samples_that_are_louder_than_loud_are_scaled():
    async with FakeEngine(lambda _: Reply((" loud",))) as engine:
        await engine.wait_ready()
        events = await run(start(sessions_on(engine)), np.full(16_000, 40.0, dtype=np.float32))
    assert assert_deltas_join(events).text == "loud"
    assert max(np.abs(request.samples).max() for request in engine.submitted) == 1.0


def test_an_utterance_never_begins_before_a_commit():
    """Whether somebody had just begun to speak, or was not heard yet."""
    for frames_before in (0, 1, 2):
        endpointer = Endpointer(RATE, EndpointPolicy())
        assert list(endpointer.feed(np.array([0.0] * 10 + [1.0] * frames_before, dtype=np.float32))) == []
        commit = (10 + frames_before) * FRAME_SAMPLES + 100
        assert endpointer.close(commit) is None
        (opened,) = endpointer.feed(np.ones(5, dtype=np.float32))
        assert opened == ("open", commit)


def test_a_cut_in_silence_closes_after_its_own_beginning():
    endpointer = Endpointer(RATE, EndpointPolicy())
    list(endpointer.feed(np.array([1.0] * 30 + [0.0] * 20, dtype=np.float32)))
    endpointer.cut(45 * FRAME_SAMPLES)
    (closed,) = endpointer.feed(np.zeros(100, dtype=np.float32))
    assert closed.at >= 45 * FRAME_SAMPLES


async def test_who_is_cancelled_while_a_thread_works_for_him_waits_for_its_end():
    entered, leave, ended = threading.Event(), threading.Event(), False

    def work() -> None:
        nonlocal ended
        entered.set()
        leave.wait(10)
        ended = True

    task = asyncio.create_task(Cores(1).call(work))
    await until(entered.is_set)
    for _ in range(5):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


async def test_a_commit_while_somebody_speaks_opens_the_next_utterance_right_there():
    audio = saying(1, 30)
    async with FakeEngine(reads) as engine:
        await engine.wait_ready()
        session = start(sessions_on(engine), endpoints=EndpointPolicy())

        async def commit(i: int) -> None:
            if i == 48_000:
                await session.commit()

        events = await run(session, audio, between=commit)
    opened = [event.start for event in events if isinstance(event, UtteranceOpened)]
    closed = [event.end for event in events if isinstance(event, UtteranceClosed)]
    assert closed[0] == opened[1] == (48_000 + 1600) / RATE
    finals = sorted((r for r in engine.submitted if not r.priority), key=lambda r: r.samples[0])
    assert np.array_equal(np.concatenate([request.samples for request in finals]), audio)


async def test_partials_leave_places_to_finals_and_all_sessions_have_their_turn():
    class Counting(FakeEngine):
        partials = most = 0

        async def transcribe(self, request: DecodeRequest):
            self.partials += bool(request.priority)
            self.most = max(self.most, self.partials)
            try:
                async with aclosing(super().transcribe(request)) as deltas:
                    async for delta in deltas:
                        yield delta
            finally:
                self.partials -= bool(request.priority)

    async with Counting(lambda r: replace(reads(r), first_seconds=0.01), concurrency=4) as engine:
        await engine.wait_ready()
        sessions = sessions_on(engine, final_places=1)
        heard = await asyncio.gather(*(run(start(sessions), saying(1, 30)) for _ in range(12)))
        assert sessions._partials == 0
        assert not sessions.open
    assert engine.most == 3
    for events in heard:
        assert assert_deltas_join(events).text.split() == [f"w{i}" for i in range(1, 31)]


async def test_a_place_is_given_back_by_a_partial_that_is_aborted_before_it_begins():
    async with FakeEngine(reads, concurrency=2) as engine:
        await engine.wait_ready()
        sessions = sessions_on(engine, final_places=1)
        for _ in range(20):
            session = start(sessions)
            await session.feed(saying(1, 5))
            session.close()  # in the same step of the loop
        await settled(engine)
        await until(lambda: sessions._partials == 0)


@pytest.mark.parametrize("seed", range(40))
async def test_leaving_at_any_moment_frees_the_engine(seed: int):
    chance = random.Random(seed)
    async with FakeEngine(lambda r: replace(reads(r), first_seconds=0.002)) as engine:
        await engine.wait_ready()
        sessions = sessions_on(engine)
        session = start(sessions, endpoints=chance.choice([None, EndpointPolicy()]))
        task = asyncio.create_task(run(session, np.concatenate([saying(1, 20), silence(2.5), saying(21, 40)])))
        for _ in range(chance.randrange(200)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        session.close()
        await settled(engine)
        await until(lambda: not sessions.open and sessions._partials == 0)


async def test_what_is_not_decoded_is_bounded_and_its_sender_waits():
    async with FakeEngine(lambda r: Reply((" a",), first_seconds=3600)) as engine:
        await engine.wait_ready()
        session = start(sessions_on(engine, buffer_seconds=60.0), endpoints=EndpointPolicy())
        fed = 0.0

        async def flood() -> None:
            nonlocal fed
            while True:
                await session.feed(saying(1, 5))
                fed += 1.0

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(flood(), 1.0)
        assert 60.0 <= fed <= 63.0
        assert not session._room.is_set()
        session.close()
        await settled(engine)


async def test_a_reader_that_reads_nothing_stops_the_sender_and_not_the_others():
    async with FakeEngine(reads) as engine:
        await engine.wait_ready()
        sessions = sessions_on(engine)
        asleep, awake = start(sessions), start(sessions)

        async def flood() -> None:
            for _ in range(10_000):
                await asleep.feed(saying(1, 3))
                await asleep.commit()
                await settled(engine)

        flooding = asyncio.create_task(flood())
        events = await run(awake, saying(1, 20))
        assert assert_deltas_join(events).text.split() == [f"w{i}" for i in range(1, 21)]
        async with asyncio.timeout(60):
            while asleep._room.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not flooding.done()
        assert asleep._events.qsize() < 1010
        flooding.cancel()
        asleep.close()


async def test_a_lost_final_ends_the_session_with_its_error_and_a_lost_partial_does_not():
    def script(request: DecodeRequest) -> Reply:
        final_lost = not request.priority and " w11" in words_in(request.samples)
        partial_lost = request.priority and len(request.samples) < 24_000
        return replace(reads(request), fail_after=len(request.prefix) if final_lost or partial_lost else None)

    async with FakeEngine(script) as engine:
        await engine.wait_ready()
        session = start(sessions_on(engine), endpoints=EndpointPolicy())
        told = []
        audio = np.concatenate([saying(1, 10), silence(3.0), saying(11, 20), silence(3.0)])

        async def feed() -> None:
            for i in range(0, len(audio), 1600):
                await session.feed(audio[i : i + 1600])
                await settled(engine)
            session.stop()

        feeding = asyncio.create_task(feed())
        with pytest.raises(TranscriptionFailedError):
            await listen(session, told)
        assert [event.utterance for event in told if isinstance(event, UtteranceFinal)] == [0]
        with pytest.raises(InvalidInputError, match="ended"):
            await feeding
        assert engine.requests == 0


async def test_an_engine_that_dies_ends_every_session_with_an_error():
    async with FakeEngine(lambda r: replace(reads(r), first_seconds=3600)) as engine:
        await engine.wait_ready()
        sessions = sessions_on(engine)
        opened = [start(sessions) for _ in range(5)]
        for session in opened:
            await session.feed(saying(1, 10))
            session.stop()
        await asyncio.sleep(0)
        engine.die()
        for session in opened:
            with pytest.raises(StenoError):
                await listen(session, [])
        with pytest.raises(UnavailableError):
            start(sessions)


async def test_draining_lets_every_session_end_with_the_audio_that_it_has():
    async with FakeEngine(reads) as engine:
        await engine.wait_ready()
        sessions = sessions_on(engine)
        session = start(sessions)
        await session.feed(saying(1, 10))
        sessions.drain()
        events = [event async for event in session.events()]
        assert assert_deltas_join(events).text.split() == [f"w{i}" for i in range(1, 11)]
        with pytest.raises(InvalidInputError, match="ended"):
            await session.feed(saying(11, 12))


async def test_a_session_has_a_longest_length():
    async with FakeEngine(reads) as engine:
        await engine.wait_ready()
        session = start(sessions_on(engine, max_seconds=2.0))
        for _ in range(11):
            await session.feed(saying(1, 1))
        with pytest.raises(InvalidInputError, match="longer than 2 seconds"):
            await session.feed(saying(1, 1))
        session.close()


async def test_a_final_that_is_silence_or_a_loop_drops_only_what_was_not_told():
    def script(request: DecodeRequest) -> Reply:
        if request.priority:
            return reads(request)
        return Reply((" thanks",), avg_logprob=-2.0, no_speech_prob=0.9)

    async with FakeEngine(script) as engine:
        await engine.wait_ready()

        async def wait(_: int) -> None:
            await settled(engine)

        events = await run(start(sessions_on(engine)), saying(1, 10), between=wait)
    words = assert_deltas_join(events).text.split()
    assert words == [f"w{i}" for i in range(1, len(words) + 1)]
    assert 4 <= len(words) < 10


async def test_free_finals_are_decoded_anew_and_a_change_is_told():
    def script(request: DecodeRequest) -> Reply:
        return reads(request) if request.priority else Reply((" something", " else"))

    async with FakeEngine(script) as engine:
        await engine.wait_ready()

        async def wait(_: int) -> None:
            await settled(engine)

        events = await run(start(sessions_on(engine, free_finals=True)), saying(1, 10), between=wait)
    assert [event.text for event in events if isinstance(event, UtteranceChanged)] == ["something else"]
    assert events[-1].segments[0].text == " something else"


async def test_the_profile_explains_where_the_time_went():
    async with FakeEngine(lambda r: replace(reads(r), first_seconds=0.01)) as engine:
        await engine.wait_ready()
        session = start(sessions_on(engine), endpoints=EndpointPolicy())
        began = time.monotonic()

        async def wait(_: int) -> None:
            await settled(engine)

        await run(session, np.concatenate([saying(1, 20), silence(3.0)]), between=wait)
        took = (time.monotonic() - began) * 1000
    summary = session.profile.summary()
    assert summary["finals"] == 1
    assert summary["partials"] >= 1
    assert 10 <= summary["engine_ms_p50"] <= took
    assert 0 < summary["first_text_ms"] <= took
    assert 0 <= summary["final_after_stop_ms"] <= took
    assert 0 < summary["vad_ms"] <= took
    assert 10 <= summary["encode_ms_p50"] <= took
    assert summary["confirm_ms_max"] is None or 0 < summary["confirm_ms_max"] <= took


@pytest.mark.parametrize(("engine_seconds", "step_seconds", "most"), [(0.2, 0.05, 6), (0.0, 0.05, 40)])
async def test_partials_come_less_often_when_the_engine_takes_long(engine_seconds: float, step_seconds: float, most: int):
    """What took longer than a step is followed by a rest as long: of two seconds the engine works at most half."""
    async with FakeEngine(lambda r: replace(reads(r), first_seconds=engine_seconds)) as engine:
        await engine.wait_ready()
        session = start(sessions_on(engine, first_seconds=step_seconds, step_seconds=step_seconds))
        began = time.monotonic()
        told: list = []
        listening = asyncio.create_task(listen(session, told))
        for i in range(40):
            await session.feed(saying(1, 10)[i * 800 : (i + 1) * 800])
            await asyncio.sleep(max(0.0, began + (i + 1) * 0.05 - time.monotonic()))
        took = time.monotonic() - began
        session.stop()
        await listening
    partials = session.profile.partials
    assert 1 <= partials <= most * max(1.0, took / 2)
    assert_deltas_join(told)
