"""The use case on the scripted engine: windows side by side, text in order, one language, nothing left behind."""

import asyncio
import io
import random
from contextlib import aclosing

import numpy as np
import pytest

from app.admission import Admission
from app.cores import Cores
from app.errors import AudioError, InvalidInputError, TranscriptionFailedError, UnavailableError
from app.metrics import Metrics
from app.speech.reader import SpeechReader
from app.speech.vad import AlwaysSpeech
from app.speech.windows import CutPolicy
from app.transcribe import Transcriber
from app.transcript import Options, Progress, Transcript
from engine.base import DecodeRequest
from engine.fake import FakeEngine, Reply
from tests import speech

PERMIT_GIVER = Admission(100)
LIMIT = 30.0


class ArrayAudio:
    """Samples that are read like a file."""

    rate = 16_000

    def __init__(self, samples: np.ndarray) -> None:
        self.samples = samples
        self._taken = 0

    @property
    def seconds(self) -> float:
        return self._taken / self.rate

    def read(self, count: int) -> np.ndarray:
        piece = self.samples[self._taken : self._taken + count]
        self._taken += len(piece)
        return piece

    def close(self) -> None:
        pass


def a_transcriber(engine: FakeEngine, **changes) -> Transcriber:
    arguments = {
        "voice_activity": AlwaysSpeech,
        "cores": Cores(2),
        "windows_per_request": 3,
        "max_seconds": 3600.0,
        "metrics": Metrics(),
    }
    return Transcriber(engine, **(arguments | changes))


def long_audio(seconds: float) -> ArrayAudio:
    """Noise whose every sample is unlike its neighbours', so that a cut or an overlap by one sample shows."""
    return ArrayAudio(np.random.default_rng(7).uniform(-0.5, 0.5, round(seconds * 16_000)).astype(np.float32))


def opened(audio: ArrayAudio) -> SpeechReader:
    return SpeechReader(audio, AlwaysSpeech(), CutPolicy(limit_seconds=LIMIT))


async def collect(transcriber: Transcriber, audio: ArrayAudio, options: Options | None = None, *, deltas: bool = True):
    with await PERMIT_GIVER.admit() as permit:
        run = transcriber.run(permit, opened(audio), options or Options(), request_id="t", stream=deltas)
        async with aclosing(run):
            return [item async for item in run if not isinstance(item, Progress)]


def number_of(request: DecodeRequest) -> int:
    return int(request.id.rsplit("-", 1)[1].split(".")[0])


@pytest.mark.parametrize("deltas", [True, False])
async def test_windows_that_end_in_any_order_come_out_in_theirs(deltas: bool):
    shuffled = random.Random(3)

    def script(request: DecodeRequest) -> Reply:
        k = number_of(request)
        return Reply((f" window {k}", f" says {k}."), first_seconds=shuffled.uniform(0, 0.02))

    async with FakeEngine(script) as engine:
        await engine.wait_ready()
        *shown, transcript = await collect(a_transcriber(engine), long_audio(200), deltas=deltas)
    count = len(engine.submitted)
    assert count >= 7
    assert transcript.text == " ".join(f"window {k} says {k}." for k in range(count))
    assert "".join(delta.text for delta in shown) == (transcript.text if deltas else "")
    assert transcript.seconds == 200
    assert transcript.usage.output_tokens == 2 * count


async def test_every_sample_is_sent_to_the_engine_exactly_once():
    audio = long_audio(130)
    async with FakeEngine() as engine:
        await engine.wait_ready()
        await collect(a_transcriber(engine), audio)
    sent = [request.samples for request in sorted(engine.submitted, key=number_of)]
    assert np.array_equal(np.concatenate(sent), audio.samples)
    assert all(len(samples) <= 480_000 for samples in sent)


async def test_a_request_holds_no_more_of_the_engine_than_its_share():
    most = 0

    def script(_request: DecodeRequest) -> Reply:
        nonlocal most
        most = max(most, engine.requests)
        return Reply((" a",), first_seconds=0.1)

    async with FakeEngine(script) as engine:
        await engine.wait_ready()
        await collect(a_transcriber(engine, windows_per_request=3), long_audio(400))
    assert most == 3


async def test_the_first_window_of_a_file_goes_before_the_later_windows_of_another():
    decoded: list[str] = []

    def script(request: DecodeRequest) -> Reply:
        decoded.append(request.id)
        return Reply((" a",), first_seconds=0.05)

    async with FakeEngine(script, concurrency=1) as engine:
        await engine.wait_ready()
        transcriber = a_transcriber(engine, windows_per_request=4)
        with await PERMIT_GIVER.admit() as permit:
            run = transcriber.run(permit, opened(long_audio(140)), Options(language="en"), request_id="long", stream=True)
            async with aclosing(run):
                await anext(run)  # its first window is through, and the others wait
                await collect(transcriber, long_audio(5), Options(language="en"))
                async for _ in run:
                    pass
    short = next(i for i, name in enumerate(decoded) if name.startswith("t-"))
    assert short <= 2  # one more was being decoded
    assert len(decoded) >= 6


async def test_the_first_window_chooses_the_language_of_all():
    def script(request: DecodeRequest) -> Reply:
        return Reply((" ja",), language="de" if number_of(request) == 0 else "cy", first_seconds=0.01)

    async with FakeEngine(script) as engine:
        await engine.wait_ready()
        *_, transcript = await collect(a_transcriber(engine), long_audio(100))
    assert [r.language for r in sorted(engine.submitted, key=number_of)] == [None, *["de"] * (len(engine.submitted) - 1)]
    assert transcript.language == "de"


async def test_a_named_language_goes_to_all_windows_at_once():
    async with FakeEngine(lambda _: Reply((" oui",))) as engine:
        await engine.wait_ready()
        options = Options(language="fr", prompt="Paris", temperature=0.4)
        *_, transcript = await collect(a_transcriber(engine), long_audio(70), options)
    assert {(r.language, r.previous_text, r.temperature) for r in engine.submitted} == {("fr", "Paris", 0.4)}
    assert transcript.language == "fr"


async def test_several_languages_are_told_apart_window_by_window():
    def script(request: DecodeRequest) -> Reply:
        return Reply((" a",), language=("de", "en", "cy")[number_of(request) % 3])

    async with FakeEngine(script) as engine:
        await engine.wait_ready()
        *_, transcript = await collect(a_transcriber(engine), long_audio(100), Options(languages=("en", "de")))
    assert {(r.language, r.languages) for r in engine.submitted} == {(None, ("en", "de"))}
    assert transcript.languages == ("de", "en")  # in the order in which they were heard; no Welsh


async def test_continuous_windows_are_told_what_was_said_before_one_after_another():
    most = 0

    def script(request: DecodeRequest) -> Reply:
        nonlocal most
        most = max(most, engine.requests)
        return Reply((f" {number_of(request)}",))

    async with FakeEngine(script) as engine:
        await engine.wait_ready()
        options = Options(language="en", prompt="Count.", continuous=True)
        *_, transcript = await collect(a_transcriber(engine), long_audio(100), options)
    assert transcript.text == "0 1 2 3"
    assert [r.previous_text for r in engine.submitted] == ["Count.", "Count. 0", "Count. 1", "Count. 2"]
    assert most == 1


@pytest.mark.parametrize("context", ["full", "true"])
async def test_a_decode_of_the_true_length_that_is_not_to_be_trusted_is_made_again_in_the_whole_window(context):
    """Each decode fails but the last; the whole window comes before a higher temperature, and stays."""
    ways: list[tuple[float, str]] = []

    def script(request: DecodeRequest) -> Reply:
        ways.append((request.temperature, request.audio_context or context))
        return Reply((" unsure",), avg_logprob=-2.0)

    async with FakeEngine(script, audio_context=context) as engine:
        await engine.wait_ready()
        await collect(a_transcriber(engine), long_audio(20), Options(language="en"))
    higher = [(temperature, "full") for temperature in (0.2, 0.4, 0.6, 0.8, 1.0)]
    assert ways == ([(0.0, "true")] if context == "true" else []) + [(0.0, "full"), *higher]


async def test_text_that_only_a_high_temperature_gave_conditions_nothing():
    def script(request: DecodeRequest) -> Reply:
        unsure = number_of(request) == 1 and request.temperature < 0.6
        return Reply((f" {number_of(request)}",), avg_logprob=-2.0 if unsure else -0.2)

    async with FakeEngine(script) as engine:
        await engine.wait_ready()
        options = Options(language="en", continuous=True)
        *_, transcript = await collect(a_transcriber(engine), long_audio(100), options)
    assert transcript.text == "0 1 2 3"
    told = {number_of(r): r.previous_text for r in engine.submitted}
    assert told == {0: "", 1: "0", 2: "", 3: "2"}


@pytest.mark.parametrize("deltas", [True, False])
@pytest.mark.parametrize(("no_speech_prob", "text"), [(0.1, "one two"), (0.9, "one")])
async def test_what_a_decode_left_out_is_taken_up_again_unless_it_is_silence(no_speech_prob: float, text: str, deltas: bool):
    def script(request: DecodeRequest) -> Reply:
        if len(request.samples) == 20 * 16_000:
            return Reply((" one",), covers_seconds=10.0)
        assert len(request.samples) == 10 * 16_000
        return Reply((" two",), avg_logprob=-0.9, no_speech_prob=no_speech_prob)

    async with FakeEngine(script) as engine:
        await engine.wait_ready()
        *shown, transcript = await collect(a_transcriber(engine), long_audio(20), deltas=deltas)
    assert transcript.text == text
    assert "".join(delta.text for delta in shown) == (text if deltas else "")


async def test_progress_ends_at_the_end_of_the_audio():
    async with FakeEngine() as engine:
        await engine.wait_ready()
        with await PERMIT_GIVER.admit() as permit:
            run = a_transcriber(engine).run(permit, opened(long_audio(100)), Options(), request_id="t", stream=True)
            async with aclosing(run):
                seconds = [item.seconds async for item in run if isinstance(item, Progress)]
    assert seconds == sorted(seconds)
    assert (len(seconds), seconds[-1]) == (4, 100.0)


async def test_an_engine_that_cannot_detect_is_not_waited_for():
    async with FakeEngine(lambda r: Reply((" a",)), multilingual=False) as engine:
        await engine.wait_ready()
        *_, transcript = await collect(a_transcriber(engine), long_audio(100))
    assert {r.language for r in engine.submitted} == {None}
    assert transcript.text == " ".join("a" * len(engine.submitted))


async def test_silence_is_an_empty_transcript():
    async with FakeEngine(lambda _: Reply(())) as engine:
        await engine.wait_ready()
        items = await collect(a_transcriber(engine), long_audio(90))
    assert len(items) == 1
    assert items[0].text == ""


@pytest.mark.parametrize("failing", [0, 1, 3])
async def test_a_lost_window_fails_the_whole_and_frees_the_rest(failing: int):
    def script(request: DecodeRequest) -> Reply:
        fails = number_of(request) == failing
        return Reply((" a", " b"), first_seconds=0.002, piece_seconds=0.002, fail_after=1 if fails else None)

    async with FakeEngine(script) as engine:
        await engine.wait_ready()
        with pytest.raises(TranscriptionFailedError):
            await collect(a_transcriber(engine), long_audio(200))
        assert engine.requests == 0


async def test_an_engine_that_dies_fails_what_it_held():
    async with FakeEngine(lambda _: Reply((" a",), first_seconds=3600)) as engine:
        await engine.wait_ready()
        task = asyncio.create_task(collect(a_transcriber(engine), long_audio(100), Options(language="en")))
        while not engine.requests:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        engine.die()
        with pytest.raises(TranscriptionFailedError):
            await task
        assert engine.requests == 0


@pytest.mark.parametrize("moment", range(0, 40, 3))
async def test_leaving_at_any_moment_frees_the_engine(moment: int):
    async with FakeEngine(lambda _: Reply((" a", " b"), first_seconds=0.001)) as engine:
        await engine.wait_ready()
        task = asyncio.create_task(collect(a_transcriber(engine), long_audio(200)))
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert engine.requests == 0
        assert task.cancelled()


async def test_closing_after_the_first_delta_frees_the_engine():
    async with FakeEngine(lambda _: Reply(tuple(f" {i}" for i in range(50)), stall_after=20)) as engine:
        await engine.wait_ready()
        with await PERMIT_GIVER.admit() as permit:
            run = a_transcriber(engine).run(permit, opened(long_audio(100)), Options(), request_id="t", stream=True)
            async with aclosing(run):
                assert (await anext(run)).text.startswith("0 1 2")
        assert engine.requests == 0


async def test_options_that_the_model_cannot_do_are_refused_before_any_work():
    async with FakeEngine(multilingual=False) as engine:
        await engine.wait_ready()
        with pytest.raises(InvalidInputError, match="'de'") as refusal:
            a_transcriber(engine).check(Options(language="de"))
        assert refusal.value.param == "language"
        a_transcriber(engine).check(Options(language="en"))


@pytest.mark.parametrize("phase", ["starting", "failed", "draining"])
async def test_an_engine_that_is_not_ready_is_unavailable_with_a_time_to_come_back(phase: str):
    engine = FakeEngine(start_seconds=3600 if phase == "starting" else 0, fail_start="broken" if phase == "failed" else "")
    async with engine:
        if phase == "failed":
            with pytest.raises(Exception, match="broken"):
                await engine.wait_ready()
        if phase != "draining":
            _assert_unavailable(engine, phase)
    _assert_unavailable(engine, "draining")


def _assert_unavailable(engine: FakeEngine, phase: str) -> None:
    with pytest.raises(UnavailableError, match=phase) as refusal:
        a_transcriber(engine).check(Options())
    assert 1 <= refusal.value.retry_after <= 120


async def test_files_are_opened_in_a_worker_and_their_errors_arrive():
    async with FakeEngine() as engine:
        await engine.wait_ready()
        with await PERMIT_GIVER.admit() as permit:
            two_seconds = speech.wav(speech.tone(2.0))
            reader = await a_transcriber(engine).open(permit, io.BytesIO(two_seconds), CutPolicy())
            assert len(reader.next_window().samples) == 32_000
            with pytest.raises(AudioError):
                await a_transcriber(engine).open(permit, io.BytesIO(b"not audio"), CutPolicy())
            with pytest.raises(AudioError, match="longer than 1 seconds"):
                await a_transcriber(engine, max_seconds=1.0).open(permit, io.BytesIO(two_seconds), CutPolicy())


async def test_the_transcript_is_last_and_says_all():
    async with FakeEngine(lambda _: Reply((" Hello", " there. "), language="en")) as engine:
        await engine.wait_ready()
        items = await collect(a_transcriber(engine), long_audio(3))
    assert "".join(item.text for item in items[:-1]) == "Hello there."
    assert isinstance(items[-1], Transcript)
    assert (items[-1].text, items[-1].language, items[-1].seconds) == ("Hello there.", "en", 3.0)
