"""The engine for asyncio: many coroutines, cancellation, errors."""

import asyncio

import pytest
from engine.engines import engine, generated, greedy, prompts

from jaxkv.engine import AsyncEngine, RequestOutputKind
from jaxkv.engine.async_engine import EngineDied

GIVEN = prompts(10, 20, seed=31)


def _with(serve, **options):
    async def main():
        served = AsyncEngine(engine(**options))
        try:
            return await asyncio.wait_for(serve(served), 60)
        finally:
            served.close()

    return asyncio.run(main())


async def _tokens(served, prompt, limit=8, **more):
    tokens = []
    async for out in served.generate(prompt, greedy(limit, output_kind=RequestOutputKind.DELTA), **more):
        tokens += out.outputs[0].token_ids
    return tokens


def test_many_coroutines():
    async def serve(served):
        return await asyncio.gather(*(_tokens(served, prompt) for prompt in GIVEN))

    assert _with(serve) == [generated(prompt, 8)[0] for prompt in GIVEN]


def test_whoever_leaves_frees_the_pages():
    async def serve(served):
        tasks = [asyncio.create_task(_tokens(served, [5] * 20, 100)) for _ in range(3)]
        async for _ in served.generate([6] * 20, greedy(100, ignore_eos=True)):
            break  # leaves in the middle
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(200):
            held = await served.call(lambda e: (e.check(), e.scheduler.cache.pool.held)[1])
            if held == 0:
                break
            await asyncio.sleep(0.02)
        assert held == 0
        return await _tokens(served, GIVEN[0])

    assert _with(serve) == generated(GIVEN[0], 8)[0]


def test_a_request_that_is_refused_says_why():
    async def serve(served):
        with pytest.raises(ValueError, match="prompt is empty"):
            await _tokens(served, [])
        first = asyncio.create_task(_tokens(served, GIVEN[1], 20, request_id="name"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'name' already"):
            await _tokens(served, GIVEN[1], request_id="name")
        with pytest.raises(ZeroDivisionError):
            await served.call(lambda e: 1 // 0)
        return await first

    assert _with(serve) == generated(GIVEN[1], 20)[0]


def test_when_the_thread_dies_everybody_is_told(monkeypatch):
    async def serve(served):
        task = asyncio.create_task(_tokens(served, [5] * 20, 100))
        await asyncio.sleep(0.05)

        def dies():
            raise SystemError("broken")

        served.engine.step = dies
        with pytest.raises(EngineDied, match="broken"):
            await task
        assert not served.alive
        assert isinstance(served.error, SystemError)
        with pytest.raises(EngineDied):
            await _tokens(served, GIVEN[0])
        with pytest.raises(EngineDied):
            await served.call(lambda e: 1)

    _with(serve)


def test_closing_tells_those_who_wait():
    async def serve(served):
        task = asyncio.create_task(_tokens(served, [5] * 20, 100))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(served.close)
        with pytest.raises(EngineDied):
            await task

    _with(serve)
