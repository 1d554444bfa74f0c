"""What a run says of itself to people."""

import asyncio
import logging
import re
from pathlib import Path

import pytest

from areal_async.config_file import load_config
from areal_async.controller import Controller, resuming
from areal_async.testing.recipes import scripted
from areal_async.testing.small_run import write_small_run

LONG_S = 1000.0


@pytest.mark.slow
def test_how_long_a_start_took_is_not_counted_from_the_beginning_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(write_small_run(tmp_path / "small", "train.steps=50"))

    async def life(*, resume: bool) -> None:
        recipes = scripted(step_s=0.02)
        async with Controller(config, run_dir=tmp_path / "run", resume=resume, recipes=recipes) as run:
            async for _ in run.steps():
                run.stop()

    asyncio.run(life(resume=False))
    resume = resuming.resume

    def after_a_long_time(*arguments: object) -> resuming.Resumed | None:
        past = resume(*arguments)  # type: ignore[arg-type]
        return None if past is None else past._replace(ended=LONG_S)

    monkeypatch.setattr(resuming, "resume", after_a_long_time)
    with caplog.at_level(logging.INFO, "areal_async"):
        asyncio.run(life(resume=True))
    seconds = [int(found[1]) for line in caplog.messages if (found := re.search(r" is there after (\d+) s$", line))]
    assert seconds  # of the trainer at least: it was there for a step
    assert max(seconds) < LONG_S / 2
