"""Work beside an engine's steps: short texts wait for nothing long, and closing for nobody."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lora_moe_jax.serving.workers import LONG_TEXT, EngineClosedError, Workers


def test_short_texts_wait_for_neither_long_ones_nor_files():
    async def main():
        workers, go_on = Workers(), threading.Event()
        held = [workers.with_text(go_on.wait, LONG_TEXT) for _ in range(20)]
        held += [workers.with_file(go_on.wait) for _ in range(20)]
        held = [asyncio.ensure_future(its) for its in held]
        assert await asyncio.wait_for(workers.with_text(lambda: 5, 1), 10) == 5
        assert not any(its.done() for its in held)
        go_on.set()
        assert all(await asyncio.gather(*held))
        workers.close()

    asyncio.run(main())


def test_what_work_raises_is_who_waits_for_its():
    async def main():
        workers = Workers()
        with pytest.raises(ZeroDivisionError):
            await workers.with_file(lambda: 1 / 0)
        workers.close()

    asyncio.run(main())


def test_closing_ends_who_waits_for_work_that_runs_or_has_not_begun():
    async def main():
        workers, go_on, began = Workers(), threading.Event(), []
        for _ in range(3):
            began.append(asyncio.ensure_future(workers.with_text(go_on.wait, LONG_TEXT)))
        await asyncio.sleep(0.1)
        workers.close()
        for its in began:
            with pytest.raises(EngineClosedError):
                await asyncio.wait_for(its, 10)
        with pytest.raises(EngineClosedError):
            await workers.with_file(list)
        go_on.set()

    asyncio.run(main())


def test_work_that_nobody_waits_for_any_more_is_not_begun():
    async def main():
        workers, go_on, done = Workers(), threading.Event(), []
        first = asyncio.ensure_future(workers.with_text(go_on.wait, LONG_TEXT))
        given_up = asyncio.ensure_future(workers.with_text(lambda: done.append(1), LONG_TEXT))
        await asyncio.sleep(0.1)
        given_up.cancel()
        await asyncio.sleep(0.1)
        go_on.set()
        await first
        await workers.with_text(list, LONG_TEXT)
        workers.close()
        return done

    assert not asyncio.run(main())
