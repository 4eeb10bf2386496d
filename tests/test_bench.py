"""The bench: its arithmetic against known values, its load, and its clients on a real socket."""

import asyncio
import json
import random
import re
import time
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from app.decoding import TOKENS_TO_BELIEVE
from app.settings import Settings
from bench.cli import app, exit_status
from bench.clients import FileClient, Listener, LiveClient, RequestError, StreamClient, events_of
from bench.compare import compare, load_run, unmatched
from bench.corpus import RATE, Clip, CorpusError, Deck, load_corpus
from bench.load import Load
from bench.metrics import BY_NAME, MAIN, changed_words, distribution, distributions, word_error_rate
from bench.reading import read
from bench.realtime import RealtimeClient
from bench.record import Record, read_rows, write_rows
from bench.results import ClientHealth, InFlight, Level, Result, load_result
from bench.search import Search, Trial, assess, parse_slos
from bench.statistics import interval, judge, least_n, needed_n, percentile, ranks
from engine.fake import FakeEngine, Reply
from tests import speech
from tests.gateway import running_gateway

# --- arithmetic -----------------------------------------------------------------------------------------------------


def test_percentiles_interpolate_linearly_and_leave_out_what_is_none():
    values = [None, 0, 1000, 2000]
    described = distribution(values)
    assert (described.p50, described.p95, described.n) == (1000, 1900, 3)
    assert percentile([None], 0.5) is None


@pytest.mark.parametrize(
    ("n", "q", "expected"),
    # Tables of order statistics, and of the binomial distribution.
    [(50, 0.5, (18, 32)), (100, 0.95, (90, 99)), (200, 0.95, (183, 196)), (300, 0.99, (290, 300)), (1000, 0.99, (983, 996))],
)
def test_ranks_that_hold_a_quantile_between_them(n, q, expected):
    assert ranks(n, q) == expected


def test_an_interval_needs_59_values_for_p95_and_299_for_p99():
    assert (least_n(0.95), least_n(0.99)) == (59, 299)
    assert ranks(58, 0.95) is None
    assert ranks(59, 0.95) is not None
    assert interval([1.0] * 10, 0.95) is None


def test_intervals_hold_the_true_quantile_as_often_as_they_say():
    draws = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        low, high = interval(sorted(draws.exponential(size=100)), 0.95)
        held += low <= -np.log(0.05) <= high
    assert held / 400 > 0.92


def test_a_limit_is_judged_only_where_the_sample_shows_it():
    assert judge(59, 0, 0.95) == "holds"
    assert judge(58, 0, 0.95) == "open"  # 0.95**58 > 0.05
    assert judge(20, 4, 0.95) == "fails"
    assert judge(100, 5, 0.95) == "open"
    assert judge(0, 0, 0.95) == "open"


@given(st.integers(1, 400), st.floats(0, 0.3))
def test_so_many_requests_as_are_said_to_be_needed_do_decide(n, share):
    over = round(n * share)
    if (needed := needed_n(n, over, 0.95)) is not None:
        assert judge(needed, round(over * needed / n), 0.95) != "open"


def test_words_that_were_taken_back():
    assert changed_words("we all live", "we all live in") == 0
    assert changed_words("we all leave in", "we all live in") == 2
    assert changed_words("", "we") == 0


def test_word_error_rate_is_over_all_words_that_are_known():
    records = [
        Record("file", 0, "a", 1.0, "Ever tried. Ever failed.", text="ever tried ever failed"),
        Record("file", 1, "b", 1.0, "No matter.", text="No matters."),
        Record("file", 2, "c", 1.0, None, text="whatever"),
        Record("file", 3, "d", 1.0, "lost", error="timeout"),
    ]
    assert word_error_rate(records) == pytest.approx(1 / 6)


def record(number=0, workload="stream", *, sent=0.0, first=0.5, ended=2.0, tokens=16, error=None, load=1.0, **fields):
    return Record(
        workload, number, f"c{number}", 4.0, None, sent=sent, first_text=first, ended=ended, tokens=tokens,
        error=error, level=load, text="words", **fields,
    )  # fmt: skip


def test_formulas():
    one = record(sent=10.0, first=10.5, ended=12.0)
    values = {name: metric.of(one) for name, metric in BY_NAME.items() if "stream" in metric.workloads}
    assert values == {"e2e": 2000, "ttft": 500, "generation": 1500, "tpot": 100}
    live = replace(one, workload="live", stopped=11.0, first_text=None, lags=[0.2, 0.7])
    assert BY_NAME["final"].of(live) == 1000
    assert BY_NAME["first_text"].of(live) is None  # and not 0
    assert BY_NAME["lag"].of(live) == 700
    late = replace(one, intended=9.0)  # an open load: the wait before sending counts
    assert BY_NAME["e2e"].of(late) == 3000


def test_failures_are_no_part_of_latencies():
    found = distributions("stream", [record(0), record(1, ended=900.0, error="timeout")])
    assert (found["e2e"].n, found["e2e"].max) == (1, 2000)


# --- reading and searching ------------------------------------------------------------------------------------------


def level(load, *, rtfx, p50=100.0, p95=None, ttft=None, ok=60, failed=0):
    records = [record(i, first=(ttft or p50 / 2) / 1000, ended=p50 / 1000) for i in range(ok)]
    metrics = distributions("stream", records)
    metrics["e2e"] = metrics["e2e"].model_copy(update={"p95": p95 or p50})
    return Level(
        load=load, sent=ok + failed, ok=ok, failed=failed, errors={"http_503": failed} if failed else {}, with_text=ok,
        wall_seconds=1, audio_seconds=rtfx, unique_audio_seconds=1, requests_per_second=1, rtfx=rtfx, tokens_per_second=1,
        wer=None, in_flight=InFlight(mean=load, min=load, max=load), metrics=metrics, server={},
        client=ClientHealth(cpu_share=0.1, loop_lag_ms_p99=1, send_late_ms_p99=None, valid=True),
    )  # fmt: skip


def test_the_knee_is_where_load_brings_latency_and_no_throughput():
    levels = [level(1, rtfx=10, p50=100), level(4, rtfx=30, p50=140), level(8, rtfx=31, p50=280), level(16, rtfx=31, p50=560)]
    reading = read("stream", levels)
    assert (reading.sweet_spot, reading.knee) == (1, 2)
    assert any("Knee: 8" in words for words in reading.words)


def test_without_a_knee_the_sweet_spot_is_where_throughput_is_highest():
    reading = read("stream", [level(1, rtfx=10), level(4, rtfx=39), level(8, rtfx=70, p50=120)])
    assert (reading.sweet_spot, reading.knee) == (2, None)


@pytest.mark.parametrize(("ttft", "binds"), [(900.0, "Prefill and queueing bind"), (60.0, "Decoding binds")])
def test_what_binds_is_what_grows_faster(ttft, binds):
    first, last = level(1, rtfx=10, p50=100, ttft=50), level(8, rtfx=20, p50=1000, ttft=ttft)
    assert any(binds in words for words in read("stream", [first, last]).words)


def test_failures_and_a_poor_client_are_told():
    poor = level(4, rtfx=1, failed=3)
    poor.client.valid, poor.client.why = False, "the client used 97% of a core"
    words = " ".join(read("stream", [level(1, rtfx=1), poor]).words)
    assert "3 of 63 failed (http_503 3)" in words
    assert "97% of a core" in words
    assert read("stream", [level(1, rtfx=0, ok=0, failed=9)]).words == ("No request succeeded.",)


SLOS = parse_slos("final_p95=1500, first_text_p95<=1000ms", "live")


def sessions(n, *, final=1.0, first=0.5, failed=0):
    good = [record(i, "live", stopped=5.0, first=first, ended=5.0 + final) for i in range(n - failed)]
    return good + [record(i, "live", error="timeout") for i in range(failed)]


def test_service_levels_are_written_as_limits_of_percentiles():
    assert [str(slo) for slo in SLOS] == ["final_p95=1500", "first_text_p95=1000"]
    for wrong in ("", "final", "final_p95", "finale_p95=1", "final_p0=1", "ttft_p95=100", "final_p95=1;drop"):
        with pytest.raises(ValueError, match=r"."):
            parse_slos(wrong, "live")


def test_a_failed_session_and_one_without_text_keep_no_limit():
    assert assess(SLOS, sessions(100)).judgements == {"final_p95": "holds", "first_text_p95": "holds"}
    assert not assess(SLOS, sessions(100, failed=20)).holds
    silent = assess(SLOS, sessions(100, first=None))
    assert (silent.judgements["first_text_p95"], silent.binding) == ("fails", "first_text_p95")


def test_too_few_sessions_prove_nothing():
    outcome = assess(SLOS, sessions(20))
    assert outcome.holds
    assert set(outcome.judgements.values()) == {"open"}
    assert 59 <= outcome.needs_n <= 62


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 64))
def test_a_search_finds_the_capacity_whatever_it_is(capacity, most, start):
    search = Search(SLOS, start=start, most=most)
    trials = []
    while (trial := search.next()) is not None:
        assert trial not in trials
        trials.append(trial)
        search.tell(trial, assess(SLOS, sessions(100, final=1.0 if trial.load <= capacity else 9.0)))
    answer = search.answer()
    assert answer.conclusive
    assert answer.last_passing == (min(capacity, most) or None)
    assert answer.first_failing == (None if capacity >= most else capacity + 1)
    assert len(trials) <= 2 * 9 + 2
    if answer.last_passing:
        assert trials[-1] == Trial(answer.last_passing, sustained=True)
        assert f"{answer.last_passing} at once keep" in answer.words
        assert type(answer.last_passing) is int


def test_a_level_that_does_not_last_is_not_the_answer():
    search = Search(SLOS, most=64)
    while (trial := search.next()) is not None:
        held = trial.load <= (5 if trial.sustained else 7)
        search.tell(trial, assess(SLOS, sessions(100, final=1.0 if held else 9.0)))
    assert (search.answer().last_passing, search.answer().first_failing) == (5, 6)


def test_what_is_not_proved_is_called_inconclusive():
    search = Search(SLOS, most=2)
    while (trial := search.next()) is not None:
        search.tell(trial, assess(SLOS, sessions(10)))
    answer = search.answer()
    assert (answer.last_passing, answer.conclusive) == (2, False)
    assert answer.words.startswith("Inconclusive, needs N=")


# --- speech ---------------------------------------------------------------------------------------------------------


def clips(n, seconds=1.0):
    return [Clip(f"c{i}", np.full(round(seconds * RATE), i, np.int16), f"word{i}") for i in range(n)]


@given(st.integers(1, 6), st.integers(1, 12), st.randoms(use_true_random=False), st.floats(0, 3))
def test_no_two_requests_in_flight_send_the_same_audio(count, places, choose, seconds):
    deck = Deck(clips(count), seconds=seconds, seed=choose.randrange(9))
    flying = []
    for _ in range(60):
        if len(flying) == places or (flying and choose.random() < 0.5):
            deck.give_back(flying.pop(choose.randrange(len(flying))))
        else:
            clip = deck.deal()
            assert clip.name not in [other.name for other in flying]
            assert clip.seconds >= seconds
            assert clip.text.split() == [f"word{name[1:]}" for name in clip.name.split("+")]
            flying.append(clip)


def test_a_seed_deals_the_same_again_and_all_clips_before_one_twice():
    dealt = [Deck(clips(5), seed=3).deal().name for _ in range(2)]
    assert dealt[0] == dealt[1]
    deck, names = Deck(clips(5), seed=3), []
    for _ in range(10):
        names.append((clip := deck.deal()).name)
        deck.give_back(clip)
    assert set(Counter(names).values()) == {2}


def test_speech_from_a_folder_and_a_manifest(tmp_path):
    (tmp_path / "a.wav").write_bytes(speech.wav(speech.tone(0.5)))
    (tmp_path / "a.txt").write_text("a tone\n")
    (tmp_path / "b.wav").write_bytes(speech.wav(speech.tone(1.0, rate=44_100), 44_100))
    (tmp_path / "notes.md").write_text("no audio")
    found = load_corpus(tmp_path)
    assert [(clip.name, clip.text) for clip in found] == [("a.wav", "a tone"), ("b.wav", None)]
    assert [clip.seconds for clip in found] == pytest.approx([0.5, 1.0], abs=0.01)
    manifest = tmp_path / "m.jsonl"
    manifest.write_text('{"audio": "a.wav", "text": "said"}\n\n{"audio_filepath": "b.wav"}\n')
    assert [clip.text for clip in load_corpus(manifest)] == ["said", None]
    (tmp_path / "broken.wav").write_bytes(b"RIFF nothing")
    with pytest.raises(CorpusError, match=r"broken\.wav"):
        load_corpus(tmp_path)
    manifest.write_text('{"text": "no audio"}\n')
    with pytest.raises(CorpusError, match=r"m\.jsonl:1"):
        load_corpus(manifest)


def test_the_built_in_speech_has_known_words_and_no_clip_twice():
    found = load_corpus(None)
    assert len({clip.name for clip in found}) == len(found) >= 12
    assert sum(clip.seconds for clip in found if clip.text) > 45
    said = " ".join(clip.text for clip in found if clip.name.startswith("two_cities"))
    assert speech.words(said) == speech.words(speech.two_cities().words)


# --- load -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=40)
def test_a_closed_load_keeps_its_requests_in_flight(concurrency, n, seed):
    times = random.Random(seed)
    flying = most = 0

    async def send(clip, record):
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        for _ in range(times.randrange(1, 5)):
            await asyncio.sleep(0)
        flying -= 1

    load = Load("file", send, Deck(clips(3)))
    asyncio.run(load.closed(n, concurrency))
    assert len(load.records) == n
    assert most == min(n, concurrency)
    summary = load.flight.summary()
    assert summary.max == most
    assert summary.min <= summary.mean <= summary.max


async def test_in_flight_is_weighted_by_time():
    async def send(clip, record):
        await asyncio.sleep(0.02)

    load = Load("file", send, Deck(clips(3)))
    await load.closed(20, 4)
    assert load.flight.summary().mean == pytest.approx(4, abs=0.5)


async def test_an_open_load_counts_from_the_intended_start_whatever_stalls():
    async def send(clip, record):
        record.sent = time.monotonic()
        if record.number == 0:
            end = time.monotonic() + 0.3  # the client itself stalls
            while time.monotonic() < end:
                pass
        record.ended = time.monotonic()

    load = Load("file", send, Deck(clips(3)))
    await load.open(30, 100, seed=1)
    assert len(load.records) == 30
    late = [BY_NAME["e2e"].of(record) for record in load.records]
    assert sum(value > 50 for value in late) >= 5  # those that were due meanwhile
    assert all(record.intended <= record.sent for record in load.records)
    gaps = np.diff(sorted(record.intended for record in load.records))
    expected = random.Random(1)
    assert gaps == pytest.approx([expected.expovariate(100) for _ in range(30)][1:], abs=1e-6)


# --- what is heard --------------------------------------------------------------------------------------------------


async def heard(*events, workload="stream"):
    found = Record(workload, 0, "c", 1.0, None)
    listener = Listener(found)

    async def lines():
        for event in events:
            for line in event.split("\n"):
                yield line
            yield ""

    async for event in events_of(lines()):
        listener.hear(event)
    listener.end()
    return found


async def test_openai_events_and_vllm_chunks_are_both_understood():
    openai = await heard(
        ": ping",
        'data: {"type":"transcript.text.delta","delta":" We"}',
        'event: message\ndata: {"type":"transcript.text.delta",\ndata: "delta":" all"}',
        'data: {"type":"transcript.text.done","text":"We all","usage":{"type":"tokens","output_tokens":2}}',
        "data: [DONE]",
        'data: {"type":"transcript.text.delta","delta":"after the end"}',
    )
    assert (openai.text, openai.tokens) == ("We all", 2)
    vllm = await heard(
        'data: {"choices":[{"delta":{"content":""}}]}',
        'data: {"choices":[{"delta":{"content":" We all"},"finish_reason":"stop"}]}',
        'data: {"choices":[],"usage":{"completion_tokens":3}}',
        "data: [DONE]",
    )
    assert (vllm.text, vllm.tokens) == ("We all", 3)
    assert vllm.first_update < vllm.first_text  # an empty chunk is no text


async def test_an_error_in_a_stream_and_one_that_breaks_off_are_failures():
    with pytest.raises(RequestError, match="stream_error"):
        await heard('data: {"type":"transcript.text.delta","delta":" We"}', 'data: {"error":{"message":"lost"}}')
    with pytest.raises(RequestError, match="incomplete"):
        await heard("data: [DONE]")


async def test_words_that_flicker_are_counted():
    found = await heard(
        'data: {"type":"transcript.text.partial","text":"we all leave","seconds":1.0}',
        'data: {"type":"transcript.text.partial","text":"we all live in","seconds":1.5}',
        'data: {"type":"transcript.text.delta","delta":"we all"}',
        'data: {"type":"transcript.text.partial","text":"live in a","seconds":2.0}',
        'data: {"type":"transcript.text.done","text":"we all live in yellow"}',
        workload="live",
    )
    assert found.partials == 3
    assert found.taken_back == 2  # `leave`, and at the end `a`
    assert len(found.lags) == 3


# --- against a gateway ----------------------------------------------------------------------------------------------

FIRST, STEP = 0.4, 0.1
WORDS = (" it", " was", " the", " best", " of", " times", " it", " was", " the", " worst", " of", " times")


class StampedEngine(FakeEngine):
    """Notes when it said what."""

    def __init__(self):
        super().__init__(lambda request: Reply(WORDS, first_seconds=FIRST, piece_seconds=STEP))
        self.stamps = []

    async def transcribe(self, request):
        stamps = []
        self.stamps.append(stamps)
        async for delta in super().transcribe(request):
            if delta.text:
                stamps.append(time.monotonic())
            yield delta


def test_the_bench_reports_the_times_at_which_the_engine_spoke():
    engine = StampedEngine()
    with running_gateway(lambda: engine, Settings(_env_file=None, vad=False)) as gateway:
        load = asyncio.run(drive(StreamClient(gateway.url, {"model": "base"}), "stream", 7, 1))
    assert all(record.ok for record in load.records)
    errors = {"ttft": [], "generation": [], "tpot": []}
    for record, stamps in zip(load.records, engine.stamps, strict=True):
        assert len(stamps) == len(WORDS)
        shown = stamps[TOKENS_TO_BELIEVE - 1]  # the gateway holds what is before
        truth = {
            "ttft": shown - record.sent,
            "generation": stamps[-1] - shown,
            "tpot": (stamps[-1] - shown) / (len(WORDS) - 1),
        }
        for name, seconds in truth.items():
            errors[name].append(abs(BY_NAME[name].of(record) / 1000 - seconds) / seconds)
    # The host takes the CPU away now and then: half of them show what the bench does.
    assert {name: percentile(values, 0.5) < 0.05 for name, values in errors.items()} == dict.fromkeys(errors, True)


async def drive(client, workload, n, concurrency, *, clip_seconds=0.0, some=None):
    async with client:
        load = Load(workload, client.send, Deck(some or load_corpus(None), seconds=clip_seconds))
        await load.closed(n, concurrency)
    return load


@pytest.fixture(scope="module")
def gateway():
    with running_gateway(
        FakeEngine, Settings(_env_file=None, max_requests=4, kept_share=0, admission_wait_seconds=0)
    ) as gateway:
        yield gateway


CLIENTS = {
    "file": FileClient,
    "stream": StreamClient,
    "live": LiveClient,
    "session": lambda url, fields: LiveClient(url, fields, door="session"),
    "realtime": RealtimeClient,
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_every_client_gets_its_text_and_its_times(gateway, kind):
    workload = "live" if kind in ("session", "realtime") else kind
    load = asyncio.run(drive(CLIENTS[kind](gateway.url, {"model": "whisper-1"}), workload, 3, 3))
    assert [(record.error, record.detail) for record in load.records] == [(None, "")] * 3
    for record in load.records:
        assert record.text.endswith("seconds of audio.")
        assert record.sent < record.ended
        if kind != "realtime":  # OpenAI's protocol has no place for them
            assert record.tokens
            assert record.server  # where the time went
        if workload == "stream":
            assert record.sent < record.first_text <= record.last_text <= record.ended
        if workload == "live":
            assert kind == "realtime" or record.partials > 0
            assert record.stopped - record.sent >= record.audio_seconds - 0.001
            assert record.first_text < record.stopped  # while the speaker spoke
            assert max(record.lags, default=0) < record.audio_seconds
            assert len(record.late) > 0.5 * record.audio_seconds / 0.1


def test_with_corrupt_files_and_refusals_every_request_is_counted_once(gateway):
    some = [*clips(6, 2.0), Clip("corrupt", np.empty(0, np.int16), None)]
    for concurrency in (1, 2, 4, 12):
        load = asyncio.run(drive(StreamClient(gateway.url, {"model": "base"}), "stream", 28, concurrency, some=some))
        kinds = Counter(record.error for record in load.records)
        assert sum(kinds.values()) == 28
        assert set(kinds) <= {None, "http_400", "http_503"}
        assert (kinds["http_503"] > 0) == (concurrency > 4)
        # An empty file is no audio; where there is no place for it, nobody looks at it.
        corrupt = Counter(record.error for record in load.records if record.clip == "corrupt")
        assert corrupt["http_400"] + corrupt["http_503"] == sum(corrupt.values()) >= 1
        assert kinds["http_400"] == corrupt["http_400"]
        assert concurrency > 4 or corrupt["http_400"] >= 1
        ok = [record for record in load.records if record.ok]
        assert distributions("stream", load.records)["e2e"].n == len(ok)


def bench(*arguments, status=0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result


def test_a_sweep_writes_its_table_its_rows_and_a_page(gateway, tmp_path):
    bench("--url", gateway.url, "--n", "6", "--concurrency", "4,1", "--out", str(tmp_path), "--price-per-hour", "1.5")
    path = tmp_path / "loadtest-concurrency.json"
    result = load_result(path)
    assert [level.load for level in result.levels] == [1, 4]
    rows = read_rows(path.with_suffix(".jsonl"))
    for found in result.levels:
        mine = [row for row in rows if row.level == found.load]
        assert len(mine) == found.sent == found.ok == 6
        assert found.rtfx == pytest.approx(sum(row.audio_seconds for row in mine) / found.wall_seconds, rel=0.01)
        assert found.metrics["e2e"].p50 == pytest.approx(np.median([1000 * (r.ended - r.sent) for r in mine]), abs=0.1)
        assert found.cost_per_audio_hour == pytest.approx(1.5 / found.rtfx, rel=0.01)
        assert found.in_flight.max == found.load
        assert found.server["total"].n == 6
    assert result.workload == "stream"
    assert result.settings["seed"] == 0
    text = path.with_suffix(".md").read_text()
    assert "| at once |" in text
    assert "too few requests to bound a p95" in text
    page = path.with_suffix(".html").read_text()
    assert page.count("<svg") == 3
    assert "seconds of audio a second" in page
    assert re.search(r"""(src|href)=["']?(?!["']?#)|@import|url\((?!#)""", page) is None  # nothing is fetched from elsewhere
    again = bench("report", str(path))
    assert "Baseline: 1 at once" in again.output


def test_two_servers_take_turns_and_are_compared(gateway, tmp_path):
    bench(
        "--url", gateway.url, "--against", f"same={gateway.url}/v1", "--n", "8", "--concurrency", "2", "--workload", "file",
        "--out", str(tmp_path),
    )  # fmt: skip
    a, b = (load_run(tmp_path / f"loadtest-concurrency{name}.json") for name in ("", ".same"))
    begun = sorted((row.sent, label) for label, (_, rows) in (("a", a), ("b", b)) for row in rows)
    assert "".join(label for _, label in begun) == "a" * 4 + "b" * 8 + "a" * 4
    # The same servers, the same clips in the same order.
    assert len(a[1]) == len(b[1]) == 8
    assert Counter(row.clip for row in a[1]) == Counter(row.clip for row in b[1])
    ratios = {ratio.what: ratio for ratio in compare(a, b)}
    assert ratios["e2e p50"].low < 1 < ratios["e2e p50"].high or 0.2 < ratios["e2e p50"].ratio < 5
    assert "ratio" in (tmp_path / "loadtest-concurrency.compare.md").read_text()
    shown = bench("compare", str(tmp_path / "loadtest-concurrency.json"), str(tmp_path / "loadtest-concurrency.same.json"))
    assert "steno / same" in shown.output


def test_ratios_and_their_intervals():
    def run(factor):
        result = Result.model_construct(workload="stream", load_kind="closed", levels=[level(4.0, rtfx=1)], label="x")
        draws = np.random.default_rng(7)
        rows = [record(i, first=0.1 * factor, ended=factor * (1 + draws.random()), load=4.0) for i in range(200)]
        return result, rows

    ratios = {ratio.what: ratio for ratio in compare(run(1.0), run(2.0))}
    assert ratios["e2e p50"].ratio == pytest.approx(0.5)
    assert ratios["e2e p50"].low < 0.5 < ratios["e2e p50"].high
    assert ratios["ttft p95"].ratio == pytest.approx(0.5)
    assert ratios["audio s / request s"].ratio == pytest.approx(2)
    with pytest.raises(ValueError, match="no level in common"):
        compare(run(1.0), (Result.model_construct(workload="stream", load_kind="closed", levels=[level(9.0, rtfx=1)]), []))


def test_live_runs_whose_work_differs_do_not_compare():
    def run(partials):
        found = level(2.0, rtfx=1)
        found.metrics["partials"] = distribution([float(partials)])
        return Result.model_construct(levels=[found])

    assert unmatched(run(10), run(10.9)) == []
    assert "not the same work" in unmatched(run(10), run(12))[0]


def test_a_search_ends_with_a_number_of_streams(gateway, tmp_path):
    # Four are admitted; a fifth is refused.
    for i in range(12):
        (tmp_path / f"{i}.wav").write_bytes(speech.wav(speech.tone(1.0, frequency=300 + i)))
    arguments = (
        "--url", gateway.url, "--workload", "live", "--slo", "final_p80=30000", "--n", "6", "--clip-seconds", "0.1",
        "--corpus", str(tmp_path), "--warmup", "0", "--out", str(tmp_path), "--progress", "none",
    )  # fmt: skip
    status = CliRunner().invoke(app, arguments).exit_code
    result = load_result(tmp_path / "slo.json")
    assert status == exit_status(result)  # client and gateway share this process: the one may have held the other up
    answer = result.slo
    assert (answer.last_passing, answer.conclusive) == (4, True)
    assert answer.first_failing >= 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--concurrency", "1,x"], "no list of numbers"),
        (["--concurrency", "0"], "greater than 0"),
        (["--concurrency", "1", "--rate", "1"], "exclude each other"),
        (["--slo", "ttft=5"], "no limit"),
        (["--slo", "ttft_p95=5", "--against", "x=http://127.0.0.1:1"], "a search measures one server"),
        (["--against", "nowhere"], "--against takes"),
        (["--progress", "loud"], "bars, json or none"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_is_sent(arguments, says):
    assert says in " ".join(bench(*arguments, "--url", "http://127.0.0.1:9", status=2).output.split())


def test_a_server_that_is_not_there_or_not_ready_or_serves_another_model_is_named(gateway):
    assert "does not answer" in bench("--url", "http://127.0.0.1:9", status=1).output
    assert "does not serve" in bench("--url", gateway.url, "--model", "large", status=1).output
    with running_gateway(lambda: FakeEngine(start_seconds=3600)) as starting:
        assert "not ready" in bench("--url", starting.url, status=1).output


def test_progress_for_programs_is_json(gateway, tmp_path):
    result = bench("--url", gateway.url, "--n", "3", "--concurrency", "1", "--progress", "json", "--out", str(tmp_path))
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["done"] for event in events if event["phase"] == "measuring"] == [0, 1, 2, 3]
    assert all(event["type"] == "progress" for event in events)


def test_exit_statuses():
    def result(*levels, slo=None):
        return Result.model_construct(levels=list(levels), slo=slo)

    good = level(1, rtfx=1)
    assert exit_status(result(good)) == 0
    assert exit_status(result(level(1, rtfx=1, ok=0, failed=3))) == 1
    for verdict, status in (("holds", 0), ("fails", 1), ("open", 3)):
        assert exit_status(result(good.model_copy(update={"slo": {"e2e_p95": verdict}}))) == status
    poor = good.model_copy(update={"client": good.client.model_copy(update={"valid": False})})
    assert exit_status(result(poor)) == 3


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [record(1, late=[0.001], server={"queue": 1.5}), record(2, error="timeout", timeline=[[0.5, "partial", 3]])]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="no rows"):
        read_rows(tmp_path / "other.jsonl")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="no result"):
        load_result(tmp_path / "other.json")


def test_the_schema_describes_every_field_of_a_result():
    schema = json.loads(bench("schema").stdout)
    assert set(schema["properties"]) == set(Result.model_fields)


def test_the_main_metric_of_every_workload_exists():
    assert all(workload in BY_NAME[name].workloads for workload, name in MAIN.items())


def test_a_client_can_measure_itself():
    output = bench("selftest", "--sessions", "5", "--seconds", "1").output
    assert "error of the time to the first text" in output
    assert "5 of 5" in output
