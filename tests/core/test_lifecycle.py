"""The tables: closed, reachable, drawn; and what an unwritten transition says."""

import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.core.lifecycle import GROUP, REWARD_WORKER, SAMPLE, SERVER, STORY_LENGTH, TRAINER, Lifecycle, Thing
from areal_async.errors import IllegalTransition

ROOT = Path(__file__).parents[2]


class Server(Thing):
    lifecycle = SERVER
    id = "2"


@pytest.mark.parametrize(
    "lifecycle", [GROUP, SAMPLE, SERVER, REWARD_WORKER, TRAINER], ids=lambda lifecycle: lifecycle.name
)
def test_every_state_is_in_its_table_and_can_be_reached(lifecycle: Lifecycle) -> None:
    reached = [lifecycle.start]
    for state in reached:
        reached += [after for after in lifecycle.table[state] if after not in reached]
    assert sorted(reached) == sorted(lifecycle.table)


def test_an_unwritten_transition_tells_the_story() -> None:
    server = Server(1.0, "joined from {}", "afar")
    server.move("updating", 2.0, "to version {}", 7)
    with pytest.raises(IllegalTransition) as error:
        server.move("updating", 3.0, "why {}", "not")
    assert str(error.value).splitlines() == [
        "server 2 can't go from updating to updating (at 3.000 s: why not). "
        "This is an error of areal-async. Its story:",
        "server 2",
        "       1.000 s  starting   joined from afar",
        "       2.000 s  updating   to version 7",
    ]


def test_a_story_keeps_what_happened_last() -> None:
    server = Server(0.0)
    for count in range(100):
        server.note(float(count), "{}", count)
    assert len(server.happenings) == STORY_LENGTH
    assert server.story().endswith("99")
    for count in range(50):
        server.move("updating", 200.0 + count)
        server.move("serving", 200.0 + count, "version {}", count)
    assert len(server.happenings) == STORY_LENGTH
    assert server.story().endswith("serving    version 49")


def test_the_page_is_drawn_from_the_tables() -> None:
    result = subprocess.run(
        [sys.executable, "tools/draw_lifecycles.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
