"""The configurations of a run that was resumed changed, with the steps that they were in force for."""

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.config_file import load_config
from areal_async.messages import Note, RolledBack, Woke
from areal_async.runfiles import CONFIG
from areal_async.view.configs import Configs, configurations

from ..replay.steps import make_run_folder, record
from .asking import asking


def note(what: str, number: int) -> Note:
    return Note(at=0.0, what=what, data={"config": number})


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 6)), max_size=8))
def test_each_step_belongs_to_the_configuration_that_trained_it_last(parts: list[tuple[int, bool, int]]) -> None:
    """parts: so many steps; then a resume, or the run itself, goes so many of them back, a resume with the next one."""
    configs, number, of = Configs(), 1, dict[int, int]()
    configs.note([note("run", 1)])
    version = 0
    for steps, resumed, back in parts:
        of.update(dict.fromkeys(range(version, version + steps), number))
        version = max(0, version + steps - back)
        if resumed:
            number += 1
            configs.note([note("resumed", number)])
        configs.back(version)
    of = {step: config for step, config in of.items() if step < version}
    of[version] = number  # it is trained next
    for config in range(1, number + 1):
        mine = sorted(step for step, other in of.items() if other == config)
        said = configs.in_words(config, number).removeprefix(", in force for ")
        assert read(said, version) == mine
        assert number > 1 or said == "all steps"


def read(said: str, last: int) -> list[int]:
    """The steps that the words name, until `last`."""
    found: list[int] = []
    for part in said.split(" and "):
        match part.split():
            case ["all", "steps"]:
                found += range(last + 1)
            case ["all", "after", "it"]:
                found += range(found[-1] + 1, last + 1)
            case ["steps", first, "to", end]:
                found += range(int(first), int(end) + 1)
            case ["step", one]:
                found.append(int(one))
            case other:
                assert other == ["no", "step", "that", "is", "left"]
    return found


@pytest.mark.slow
async def test_the_page_has_all_of_them(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path)
    with closing((log := record(run)).log):
        log.log.append(note("run", 1))
        log.log.append(note("resumed", 2))
        log.log.append(RolledBack(at=1.0, to=4, why="resumed", resumed=load_config(run / CONFIG).rules))
        log.log.append(Woke(at=2.0))  # a live run's last event is told when the next one is there
        log.log.flush()
    newest = (run / CONFIG).read_text()
    (run / "config-1.yaml").write_text("seed: 1\n")
    async with asking(run) as asked:
        await asked.read("run")
        text = await (await asked.get("/api/runs/run/config")).text()
        wanted = f"# config.yaml, the newest, in force for step 4 and all after it\n{newest}"
        assert text == f"{wanted}---\n# config-1.yaml, before a resume, in force for steps 0 to 3\nseed: 1\n"
        (run / "config-1.yaml").unlink()
        assert await (await asked.get("/api/runs/run/config")).text() == newest
        (run / CONFIG).unlink()
        assert f"{CONFIG}: can't be read: No such file" in await asked.error("/api/runs/run/config", 404)


def test_a_log_that_does_not_say_it_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("seed: 2\n")
    (tmp_path / "config-1.yaml").write_text("seed: 1\n")
    unread, older = Configs(), Configs()
    older.note([Note(at=0.0, what="run", data={}), Note(at=1.0, what="resumed", data={})])
    older.back(4)
    half = Configs()
    half.note([note("run", 1)])
    begun = Configs()  # what it went back to isn't read yet
    begun.note([note("run", 1), note("resumed", 2)])
    for configs in (unread, older, half, begun):
        text = "# config.yaml, the newest\nseed: 2\n---\n# config-1.yaml, before a resume\nseed: 1\n"
        assert configurations(tmp_path, configs) == text
