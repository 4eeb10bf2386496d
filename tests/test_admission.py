"""Permits: how many, for whom, and who waits."""

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.admission import Admission, KeyLimits, Permit
from app.errors import RateLimitError, UnavailableError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


STEPS = st.lists(st.tuples(st.sampled_from(["come", "leave", "give up"]), st.sampled_from(["file", "live"])), max_size=60)


@given(limit=st.integers(0, 6), share=st.sampled_from([0.0, 0.25, 0.5]), waits=st.booleans(), steps=STEPS)
def test_places_are_never_passed_nor_lost_whoever_comes_leaves_or_gives_up(limit, share, waits, steps):
    async def run() -> None:
        admission = Admission(limit, kept_share=share, wait_seconds=1000.0 if waits else 0.0)
        most = limit - int(limit * share)
        asking: list[asyncio.Task[Permit]] = []
        out: list[Permit] = []

        async def settle() -> None:
            for _ in range(4):
                await asyncio.sleep(0)
            for task in [task for task in asking if task.done()]:
                asking.remove(task)
                if not task.cancelled() and not isinstance(task.exception(), UnavailableError):
                    out.append(task.result())
            assert admission.in_progress == len(out) <= limit
            assert all(count <= most for count in admission.out.values())
            assert admission.waiting == len(asking)
            free = limit - len(out)
            for kind in ("file", "live"):  # nobody waits while there is a place for him
                assert not free or admission.out[kind] == most or all(task.get_name() != kind for task in asking)

        for step, kind in steps:
            if step == "come":
                asking.append(asyncio.create_task(admission.admit(kind=kind), name=kind))
            elif step == "leave" and out:
                out.pop(0).__exit__(None, None, None)
            elif step == "give up" and asking:
                asking[len(steps) % len(asking)].cancel()
            await settle()
        while out:
            out.pop().__exit__(None, None, None)
            await settle()
        assert not (asking and limit)
        for task in asking:
            task.cancel()
        await settle()
        assert (admission.in_progress, admission.waiting) == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize("when", ["before", "as it is given"])
async def test_who_leaves_while_a_place_is_given_to_him_does_not_keep_it(when: str):
    admission = Admission(1, wait_seconds=1000.0)
    permit = await admission.admit()
    asking = asyncio.create_task(admission.admit("alice"))
    await asyncio.sleep(0)
    if when == "before":
        asking.cancel()
    permit.__exit__(None, None, None)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (admission.in_progress, admission.waiting) == (0, 0)
    with await admission.admit("alice"):
        assert admission.in_progress == 1


async def test_a_place_that_comes_back_in_time_is_had_and_one_that_does_not_is_not():
    admission = Admission(1, wait_seconds=0.2)
    with await admission.admit():
        with pytest.raises(UnavailableError, match="All 1 places"):
            await admission.admit()
        asking = asyncio.create_task(admission.admit())
        await asyncio.sleep(0.01)
        assert admission.waiting == 1
    with await asking:
        assert admission.in_progress == 1


async def test_who_would_wait_in_vain_is_refused_at_once_and_told_how_long_places_are_held():
    clock = Clock()
    admission = Admission(2, wait_seconds=10.0, now=clock)
    for _ in range(50):
        with await admission.admit():
            clock.now += 60
    async with asyncio.timeout(1):
        with await admission.admit(), await admission.admit(), pytest.raises(UnavailableError) as refusal:
            await admission.admit()
    assert refusal.value.retry_after == 30  # a minute each, in two places


async def test_a_place_that_the_other_kind_gives_back_is_waited_for():
    clock = Clock()
    admission = Admission(4, kept_share=0.25, wait_seconds=2.0, now=clock)
    for kind, seconds in (("live", 600), ("file", 0.5)):
        with await admission.admit(kind=kind):
            clock.now += seconds
    speakers = [await admission.admit(kind="live") for _ in range(2)]
    files = [await admission.admit(kind="file") for _ in range(2)]
    asking = asyncio.create_task(admission.admit(kind="live"))
    await asyncio.sleep(0)
    assert admission.waiting == 1
    files[0].__exit__(None, None, None)
    with await asking:
        assert admission.out["live"] == 3
    for permit in (*speakers, files[1]):
        permit.__exit__(None, None, None)


async def test_each_kind_of_work_leaves_the_other_its_share():
    admission = Admission(8, kept_share=0.25)
    with ExitStack() as held:
        for _ in range(6):
            held.enter_context(await admission.admit(kind="live"))
        with pytest.raises(UnavailableError, match="All 6 places for this"):
            await admission.admit(kind="live")
        for _ in range(2):
            held.enter_context(await admission.admit(kind="file"))
        for kind in ("live", "file"):
            with pytest.raises(UnavailableError, match="All 8 places"):
                await admission.admit(kind=kind)


async def test_the_refusal_says_when_to_come_back():
    admission = Admission(1)
    with await admission.admit(), pytest.raises(UnavailableError, match="1") as refusal:
        await admission.admit()
    assert 1 <= refusal.value.retry_after <= 120
    with await admission.admit():
        assert admission.in_progress == 1


@pytest.mark.parametrize(("asked", "told"), [(-3, 1), (0, 1), (1, 1), (120, 120), (9999, 120)])
def test_no_refusal_sends_a_client_away_for_longer_than_two_minutes(asked, told):
    assert UnavailableError("busy", retry_after=asked).retry_after == told


async def test_a_limit_of_none_refuses_everyone():
    with pytest.raises(UnavailableError):
        await Admission(0, wait_seconds=5).admit()


async def test_every_permit_has_a_number_of_its_own():
    admission = Admission(2)
    with await admission.admit() as first, await admission.admit() as second:
        assert first.number != second.number
    with await admission.admit() as third:
        assert third.number not in (first.number, second.number)


# --- what each key may have ---------------------------------------------------------------------------------------------


async def test_a_key_that_has_all_it_may_have_is_refused_and_others_are_not():
    admission = Admission(10, KeyLimits(requests=2, live_sessions=1), unbounded="own")
    with ExitStack() as held:
        held.enter_context(await admission.admit("alice", kind="live"))
        with pytest.raises(RateLimitError, match="1 live sessions"):
            await admission.admit("alice", kind="live")
        held.enter_context(await admission.admit("alice"))
        with pytest.raises(RateLimitError, match="2 requests"):
            await admission.admit("alice")
        held.enter_context(await admission.admit("bob"))
        for _ in range(7):
            held.enter_context(await admission.admit("own", kind="live"))
        with pytest.raises(UnavailableError):
            await admission.admit("own")
        assert admission.rate_headers("alice")["x-ratelimit-remaining-requests"] == "0"
        assert admission.rate_headers("bob")["x-ratelimit-remaining-live-sessions"] == "1"
    assert admission.in_progress == 0
    assert admission.rate_headers("alice")["x-ratelimit-remaining-requests"] == "2"


async def test_who_was_refused_for_want_of_places_has_used_nothing():
    admission = Admission(1, KeyLimits(requests=2, live_sessions=2))
    with await admission.admit("bob"):
        for _ in range(5):
            with pytest.raises(UnavailableError):
                await admission.admit("alice", kind="live")
        assert admission.rate_headers("alice")["x-ratelimit-remaining-requests"] == "2"
        assert admission.rate_headers("alice")["x-ratelimit-remaining-live-sessions"] == "2"


async def test_audio_is_charged_when_it_is_known_and_comes_back_with_time():
    clock = Clock()
    admission = Admission(10, KeyLimits(audio_seconds_per_minute=60.0), now=clock)
    with await admission.admit("alice") as permit:
        permit.spend(90.0)
    headers = admission.rate_headers("alice")
    assert headers["x-ratelimit-remaining-audio-seconds"] == "0"
    assert headers["x-ratelimit-reset-audio-seconds"] == "90.0s"
    with pytest.raises(RateLimitError) as refused:
        await admission.admit("alice")
    assert refused.value.retry_after == 31
    clock.now += 31
    with await admission.admit("alice"):
        pass
    clock.now += 10_000  # no more than a minute's worth is kept
    assert admission.rate_headers("alice")["x-ratelimit-remaining-audio-seconds"] == "60"


@given(spent=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=30))
def test_over_any_time_no_more_is_admitted_than_the_rate_and_what_was_kept_allow(spent: list[tuple[float, float]]):
    async def run() -> None:
        clock = Clock()
        admission = Admission(10, KeyLimits(audio_seconds_per_minute=30.0), now=clock)
        total = 0.0
        for pause, seconds in spent:
            clock.now += pause
            try:
                with await admission.admit("alice") as permit:
                    assert total <= 30.0 + (clock.now - 1000.0) * 0.5 + 1e-6
                    permit.spend(seconds)
                    total += seconds
            except RateLimitError:
                assert total > 0.0

    asyncio.run(run())
