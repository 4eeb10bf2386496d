"""The scheduler that Steno is measured against: every session's decodes go through one thread, batch after batch.

This is how FunASR's realtime server works, rebuilt from its description: an unbounded queue; a thread that waits 10 ms for
company, takes at most 16 requests in the order in which they came, and parts them by their parameters, so that partials and
finals never share a batch; each batch runs to the end of its longest text before the next one begins. There is no priority,
and a request that nobody wants any more is decoded all the same. Model, weights, inputs and rules are those of
`engine.vllm_engine`.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.base import PRIORITY_TURNS
from engine.vllm_engine import LoadedModel, VllmEngine, engine_args

WINDOW_SECONDS = 0.010
MAX_BATCH = 16


@dataclass(slots=True)
class _Waiting:
    request: Any
    group: Hashable
    answer: "asyncio.Future[Any]"
    loop: asyncio.AbstractEventLoop


class Batcher:
    """Runs requests in batches, in one thread.

    Args:
        run: answers a batch of requests, all at once; it blocks.

    """

    def __init__(self, run: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._run = run
        self._queue: queue.Queue[_Waiting | None] = queue.Queue()
        self.unfinished = 0
        self.failed = False
        self._thread = threading.Thread(target=self._work, name="sync-batch", daemon=True)
        self._thread.start()

    async def submit(self, request: Any, group: Hashable) -> Any:
        """Wait for a request's turn, and for its batch. Requests share a batch only within a group."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, group, loop.create_future(), loop)
        self.unfinished += 1
        self._queue.put(waiting)
        return await waiting.answer

    def close(self) -> None:
        """End the thread after the batch at hand."""
        self._queue.put(None)

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            groups: dict[Hashable, list[_Waiting]] = {first.group: [first]}
            deadline = time.monotonic() + WINDOW_SECONDS
            for _ in range(MAX_BATCH - 1):
                try:
                    waiting = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    break
                if waiting is None:
                    self._queue.put(None)
                    break
                groups.setdefault(waiting.group, []).append(waiting)
            for batch in groups.values():
                self._run_batch(batch)

    def _run_batch(self, batch: list[_Waiting]) -> None:
        try:
            answers = list(self._run([waiting.request for waiting in batch]))
        except Exception as error:
            self.failed = True
            answers = [error] * len(batch)
        for waiting, answer in zip(batch, answers, strict=True):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                waiting.loop.call_soon_threadsafe(self._answer, waiting, answer)

    def _answer(self, waiting: _Waiting, answer: Any) -> None:
        self.unfinished -= 1
        if waiting.answer.done():
            return
        if isinstance(answer, Exception):
            waiting.answer.set_exception(answer)
        else:
            waiting.answer.set_result(answer)


class SyncBatchEngine(VllmEngine):
    """An `Engine` over synchronous vLLM. Its text comes in one piece, and closing a request frees nothing."""

    def _build(self, model: LoadedModel) -> Any:
        return _SyncLlm(model)


class _SyncLlm:
    """What `VllmEngine` uses of `AsyncLLM`, over vLLM's synchronous engine, whose core is a process of its own."""

    def __init__(self, model: LoadedModel) -> None:
        import os

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = replace(engine_args(model), scheduler_cls=None)
        self._engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=True)
        self._batcher = Batcher(self._generate)

    @property
    def engine_core(self) -> Any:
        """The client of the engine's process."""
        return self._engine.engine_core

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""
        return self._batcher.failed

    def get_num_unfinished_requests(self) -> int:
        """How many requests wait or run."""
        return self._batcher.unfinished

    async def generate(self, inputs: Any, sampling: Any, request_id: str, priority: int) -> AsyncGenerator[Any, None]:
        """Yield the one output of a request."""
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineGenerateError

        sampling.output_kind = RequestOutputKind.FINAL_ONLY
        try:
            yield await self._batcher.submit((request_id, inputs, sampling), group=priority // PRIORITY_TURNS)
        except EngineGenerateError:
            raise
        except Exception as error:
            raise EngineGenerateError from error

    async def abort(self, _request_id: str) -> None:
        """Do nothing: a batch cannot be left."""

    def shutdown(self, *_: Any) -> None:
        """Stop the engine's process."""
        self._batcher.close()
        self._engine.engine_core.shutdown()

    def _generate(self, batch: Sequence[Any]) -> list[Any]:
        """Do as `vllm.LLM.generate` does: submit all, and step until all have ended."""
        finished: dict[str, Any] = {}
        order = []
        for number, (request_id, inputs, sampling) in enumerate(batch):
            name = f"{request_id}/{number}"
            order.append(name)
            self._engine.add_request(name, inputs, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    finished[output.request_id] = output
        return [finished[name] for name in order]
