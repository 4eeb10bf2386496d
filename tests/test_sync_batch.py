"""The batcher that Steno is compared with, over a scripted engine."""

import asyncio
import threading

import pytest

from engine.sync_batch import MAX_BATCH, Batcher


class Recorder:
    """Answers batches when it is let, and remembers them."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self, batch: list[str]) -> list[str]:
        self.batches.append(list(batch))
        self.may_answer.wait(10)
        return [request.upper() for request in batch]


async def test_who_comes_within_the_window_shares_a_batch_and_is_answered_by_it():
    record = Recorder()
    batcher = Batcher(record)
    answers = await asyncio.gather(*(batcher.submit(f"r{i}", "partial") for i in range(5)))
    assert answers == [f"R{i}" for i in range(5)]
    assert record.batches == [[f"r{i}" for i in range(5)]]
    assert batcher.unfinished == 0
    batcher.close()


async def test_what_waits_behind_a_batch_comes_in_its_order_at_most_sixteen_at_once_and_groups_apart():
    record = Recorder()
    record.may_answer.clear()
    batcher = Batcher(record)
    first = asyncio.create_task(batcher.submit("first", "partial"))
    while not record.batches:  # noqa: ASYNC110 - a thread brings it about
        await asyncio.sleep(0.001)
    rest = [asyncio.create_task(batcher.submit(f"r{i}", "final" if i % 4 == 0 else "partial")) for i in range(40)]
    await asyncio.sleep(0)
    record.may_answer.set()
    await asyncio.gather(first, *rest)
    sizes = [len(batch) for batch in record.batches]
    assert sum(sizes) == 41
    assert max(sizes) <= MAX_BATCH
    for batch in record.batches[1:]:
        assert len({int(name[1:]) % 4 == 0 for name in batch}) == 1
    partials = [name for batch in record.batches[1:] for name in batch if int(name[1:]) % 4]
    assert partials == sorted(partials, key=lambda name: int(name[1:]))
    batcher.close()


async def test_one_that_leaves_is_decoded_all_the_same():
    record = Recorder()
    record.may_answer.clear()
    batcher = Batcher(record)
    leaving = asyncio.create_task(batcher.submit("leaves", "partial"))
    staying = asyncio.create_task(batcher.submit("stays", "partial"))
    await asyncio.sleep(0)
    leaving.cancel()
    record.may_answer.set()
    assert await staying == "STAYS"
    assert sorted(name for batch in record.batches for name in batch) == ["leaves", "stays"]
    batcher.close()


async def test_a_batch_that_fails_fails_all_that_are_in_it():
    def run(_batch: list[str]) -> list[str]:
        raise OSError("the engine died")

    batcher = Batcher(run)
    for answer in await asyncio.gather(*(batcher.submit(f"r{i}", 0) for i in range(3)), return_exceptions=True):
        assert isinstance(answer, OSError)
    assert batcher.failed
    with pytest.raises(OSError, match="died"):
        await batcher.submit("later", 0)
    batcher.close()
