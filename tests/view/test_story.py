"""A story is told by a child, which has an end in any case."""

import asyncio
import os
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from areal_async.errors import ArealError, ConfigError
from areal_async.trace import story
from areal_async.trace.things import thing
from areal_async.view.api import Story
from areal_async.view.story import AT_ONCE, MOST_LINES, NoSuchThing, Stories

from ..waiting import until

LOG = Path(__file__).resolve().parents[1] / "logs" / "wait-gone-back-resumed"
T = TypeVar("T")


PATIENCE_S = 180.0  # children have the lowest priority: beside other work they hardly run


def ran(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await work

    return asyncio.run(bounded())


def program(tmp_path: Path, text: str) -> tuple[str, ...]:
    """A child that isn't `areal-async trace`; its arguments are the log folder, the id and --json."""
    path = tmp_path / "child.py"
    path.write_text(text)
    return (sys.executable, "-S", str(path))  # -S: it starts faster


@pytest.mark.slow
@pytest.mark.parametrize("name", ["0.0", "step 1", "server 0", "trainer", "0"])
def test_it_is_what_trace_tells(name: str) -> None:
    told = ran(Stories(deadline_s=PATIENCE_S).tell(LOG, name))
    lines = list(story.tell(LOG, thing(name), lambda torn: None))
    assert [(line.at, line.text) for line in told.lines] == [(line.at, line.text) for line in lines]
    assert told.thing == thing(name).label


@pytest.mark.slow
def test_its_error_is_passed_on() -> None:
    with pytest.raises(NoSuchThing, match=r"there is no step 999; steps 0 to \d+ were formed"):
        ran(Stories(deadline_s=PATIENCE_S).tell(LOG, "step 999"))
    with pytest.raises(ArealError, match="nowhere"):
        ran(Stories(deadline_s=PATIENCE_S).tell(Path("/nowhere/log"), "12"))


def test_an_id_that_can_be_none_starts_nothing() -> None:
    with pytest.raises(ConfigError, match="is no step"):
        ran(Stories(("/nowhere/program",)).tell(LOG, "step x"))


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pids of all that are started, also of those that are ended before they have done anything."""
    pids: list[int] = []
    begin = asyncio.create_subprocess_exec

    async def noted(*command: str, **options: Any) -> asyncio.subprocess.Process:
        child = await begin(*command, **options)
        pids.append(child.pid)
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    return pids


@pytest.mark.slow
def test_a_child_that_takes_too_long_is_ended(tmp_path: Path, children: list[int]) -> None:
    endless = f"import time\ntime.sleep({2 * PATIENCE_S})\n"
    begun = time.monotonic()
    with pytest.raises(ArealError, match=r"the story of step 3 was not told within 1 s, .* --story 'step 3'"):
        ran(Stories(program(tmp_path, endless), deadline_s=1.0).tell(LOG, "step 3"))
    assert 1.0 <= time.monotonic() - begun < PATIENCE_S
    (child,) = children
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_who_leaves_takes_his_child_with_him(tmp_path: Path) -> None:
    wrote = tmp_path / "pid"
    endless = f"import os, time\nopen({str(wrote)!r}, 'w').write(str(os.getpid()))\ntime.sleep({2 * PATIENCE_S})\n"

    async def left() -> None:
        asking = asyncio.create_task(Stories(program(tmp_path, endless)).tell(LOG, "12"))
        await until(lambda: wrote.is_file() and wrote.read_text(), PATIENCE_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    ran(left())
    with pytest.raises(ProcessLookupError):
        os.kill(int(wrote.read_text()), 0)


@pytest.mark.slow
def test_few_at_a_time(tmp_path: Path) -> None:
    """Each says how many there are, itself included, when it begins."""
    counting = (
        "import json, os, sys, time\n"
        "folder = sys.argv[1]\n"
        "open(f'{folder}/{os.getpid()}', 'w').close()\n"
        "time.sleep(0.05)\n"
        "print(json.dumps({'event': 0, 'at': 0.0, 'text': str(len(os.listdir(folder)))}))\n"
        "os.unlink(f'{folder}/{os.getpid()}')\n"
    )
    (tmp_path / "now").mkdir()

    async def many() -> list[Story]:
        stories = Stories(program(tmp_path, counting))
        return await asyncio.gather(*(stories.tell(tmp_path / "now", "12") for _ in range(5)))

    counts = [int(told.lines[0].text) for told in ran(many())]
    assert max(counts) <= AT_ONCE
    assert len(counts) == 5


def test_of_a_very_long_one_beginning_and_end(tmp_path: Path) -> None:
    count = MOST_LINES + 100
    long = f'for n in range({count}):\n    print(\'{{"event": 0, "at": %d.5, "text": "line %d"}}\' % (n, n))\n'
    told = ran(Stories(program(tmp_path, long)).tell(LOG, "trainer"))
    texts = [line.text for line in told.lines]
    assert len(texts) == MOST_LINES + 1
    assert (texts[0], texts[-1]) == ("line 0", f"line {count - 1}")
    assert texts[MOST_LINES // 2] == "… 100 lines are left out here: areal-async trace has them"


def test_what_it_says_last_is_why(tmp_path: Path) -> None:
    failing = "import sys\nprint('something before', file=sys.stderr)\nsys.exit('log/decisions.log: damaged at 12')\n"
    with pytest.raises(ArealError, match=r"^the story of 12 can't be told: log/decisions.log: damaged at 12$"):
        ran(Stories(program(tmp_path, failing)).tell(LOG, "12"))
