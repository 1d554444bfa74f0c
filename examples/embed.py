"""A run inside somebody else's program: an aiohttp application that trains while it serves its own pages.

    python examples/embed.py [CONFIG] [PORT]
    curl localhost:8080/progress

The workflow is its own (it asks twice when the first answer was cut) and so is the reward. The controller installs no
signal handler and no loop policy; stopping the application ends the run and everything that it has started.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from areal_async import Controller, load_config
from areal_async.controller import StepRow
from areal_async.errors import ArealError
from areal_async.rollout.session import Session
from areal_async.rollout.workflow import Prompt, Sample

ROWS = web.AppKey("rows", list[StepRow])
RUN = web.AppKey("run", Controller)
CONFIG = web.AppKey("config", str)


class SecondChance:
    """One question; an answer that was cut at the limit is asked for once more."""

    async def run(self, session: Session, prompt: Prompt) -> Sample:
        completion = await session.generate(prompt.token_ids)
        if completion.finish_reason == "length":
            completion = await session.generate(prompt.token_ids)
        return Sample.single(prompt.token_ids, completion)


def last_number(response: str, answer: str | None) -> float:
    """1 where what follows the last '>' is the answer; a little for having got that far."""
    _, found, last = response.rpartition(">")
    return 1.0 if found and last.strip() == answer else 0.1 * bool(found)


async def progress(request: web.Request) -> web.Response:
    rows, run = request.app[ROWS], request.app[RUN]
    steps = [{"step": row.step, "reward": row.reward_mean, "lag_max": row.lag_max} for row in rows]
    return web.json_response({"phase": run.phase, "steps": steps})


async def training(app: web.Application) -> AsyncIterator[None]:
    """Begins with the application and ends with it."""
    config = load_config(app[CONFIG])
    async with Controller(config, workflow=SecondChance(), reward=last_number) as run:
        app[RUN] = run

        async def follow() -> None:
            try:
                async for row in run.steps():
                    app[ROWS].append(row)
                    print(msgspec.json.encode(row).decode(), flush=True)
                print(f"model: {run.result().model}", flush=True)
            except ArealError as error:
                print(f"the run has failed: {error}", file=sys.stderr, flush=True)

        following = asyncio.create_task(follow())
        yield
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def main(config: str = "configs/quickstart.yaml", port: str = "8080") -> None:
    logging.basicConfig(level=logging.INFO)
    app = web.Application()
    app[CONFIG] = config
    app[ROWS] = []
    app.router.add_get("/progress", progress)
    app.cleanup_ctx.append(training)
    web.run_app(app, host="127.0.0.1", port=int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
