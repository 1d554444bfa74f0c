"""A resume may change the configuration: which one was in force for which steps, and the trainer again with it."""

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from areal_async.config import Config
from areal_async.config_file import dump_config, load_config
from areal_async.controller import Controller, trainer
from areal_async.controller.runfolder import RunFolder
from areal_async.errors import ConfigError
from areal_async.launch.recipes import Command, Recipes
from areal_async.log.reader import read_records
from areal_async.messages import Note, RolledBack, TrainerSpec
from areal_async.replay.history import read_history
from areal_async.replay.trainer import Nobody, plan, train_again
from areal_async.runfiles import CONFIG, config_path, earlier_configs
from areal_async.testing.recipes import scripted
from areal_async.testing.small_run import write_small_run

from .steps import Recorder, make_run_folder, record

RATES = (0.5, 0.25, 0.25)  # of three lives; the third asks for more steps besides


def settled(folder: Path) -> list[str]:
    """What config 1, 2, … are."""
    return [config_path(folder, number).read_text() for number in range(1, len(earlier_configs(folder)) + 2)]


def test_each_configuration_keeps_its_number(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path)
    (run / "log").mkdir()
    one = load_config(run / CONFIG)
    two = replace(one, seed=8)
    (run / CONFIG).write_text(dump_config(one))
    for odd in ("config-0.yaml", "config-07.yaml", "config-x.yaml", "config-1.yaml.bak"):
        (run / odd).write_text("")
    wanted = [f"number {number}" for number in range(1, 9)]
    for number, text in enumerate(wanted, 1):
        (run / f"config-{number}.yaml").write_text(text)
    wanted.append(dump_config(one))
    for config in (one, two, two, one):
        changed = dump_config(config) != wanted[-1]
        wanted += [dump_config(config)] * changed
        folder = RunFolder.reopen(config, run)
        folder.close()
        assert folder.config == len(wanted)
        assert settled(run) == wanted
    assert list(earlier_configs(run)) == list(range(1, len(wanted)))  # 10 behind 9


def test_a_resume_that_is_killed_while_it_writes_its_configuration_changes_no_number(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path)
    one = load_config(run / CONFIG)
    (run / CONFIG).write_text(dump_config(one))
    (run / "config-1.yaml").write_text(dump_config(one))  # the one before is kept, the new one isn't there yet
    (run / f".{CONFIG}").write_text("name: sma")
    for config, number in ((one, 2), (replace(one, seed=8), 3)):
        folder = RunFolder.reopen(config, run)
        folder.close()
        assert folder.config == number
        assert config_path(run, 1).read_text() == dump_config(one)
        assert config_path(run, number).read_text() == dump_config(config)


def step(log: Recorder, number: int) -> None:
    log.sample(number)
    log.sent(number)
    log.done(number)


def resume(log: Recorder, to: int, config: Config, number: int | None) -> None:
    log.log.append(Note(at=log.at, what="resumed", data={} if number is None else {"config": number}))
    log.branch += 1
    log.log.append(RolledBack(at=log.at, to=to, why="resumed", resumed=config.rules))


def test_a_step_has_the_configuration_of_the_life_that_trained_it_last(tmp_path: Path) -> None:
    """Life 1 (an older areal-async) trains 0, 1; life 2, of number 1, trains 1 again and 2; life 3, of number 2, goes
    back to 2, and later, on its own, to 1; life 4 is of an older one again."""
    run = make_run_folder(tmp_path)
    log = record(run)
    first, config = (run / CONFIG).read_text(), load_config(run / CONFIG)
    with closing(log.log):
        step(log, 0)
        step(log, 1)
        resume(log, 1, config, 1)
        step(log, 1)
        step(log, 2)
        resume(log, 2, config, 2)
        step(log, 2)
        log.log.flush()
        assert [each.config for each in read_history(run / "log").steps] == [0, 1, 2]
        (run / "config-3.yaml").touch()
        with pytest.raises(ConfigError, match=r"config-1\.yaml: missing; steps were trained with it: .*--from step-N"):
            plan(run / "log", (), None, None)
        (run / "config-3.yaml").unlink()
        (run / "config-1.yaml").write_text(first.replace("train: {", "train: {lr: 0.5, "))
        said = plan(run / "log", (), None, None).said
        assert said[0] == "step 1 was trained with other settings (config-1.yaml: lr 0.5, now 1e-06), and so here"
        assert said[1].startswith("config-1.yaml: before a resume the trainer had other settings (lr 0.5")  # of step 0
        log.back(1)
        step(log, 1)
        log.log.flush()
        planned = plan(run / "log", (), None, None)
        assert [each.config for each in planned.steps] == [0, 2]
        assert planned.earlier == {}
        resume(log, 2, config, None)
        step(log, 2)
        log.log.flush()
    assert [each.config for each in read_history(run / "log").steps] == [0, 2, 0]


def asked(recipes: Recipes, rates: list[float]) -> Recipes:
    """Those `recipes`, and a list of the learning rates that a trainer was started with."""

    def started(*, connect: str, spec: str, ranks: int, **further: object) -> Command:
        rates.append(msgspec.json.decode(Path(spec).read_bytes(), type=TrainerSpec).lr)
        made: Callable[..., Command] = recipes.trainer
        return made(connect=connect, spec=spec, ranks=ranks, **further)

    return dataclasses.replace(recipes, trainer=started)


async def life(folder: Path, config: Config, stop: int) -> None:
    """One controller of the run in `folder`, stopped after the step `stop`, or its first one if that is later."""
    begun = (folder / "run").exists()
    async with Controller(config, run_dir=folder / "run", resume=begun, recipes=scripted(step_s=0.05)) as run:
        async for row in run.steps():
            if row.step >= stop:
                run.stop()


@pytest.mark.slow
def test_each_part_of_a_run_is_trained_again_with_its_own_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the end of the first ranks is noticed late: it is nothing to the next ones, who have their names."""
    config = load_config(write_small_run(tmp_path / "small", "train.steps=20"))
    for number, rate in enumerate(RATES):
        train = replace(config.train, lr=rate, steps=20 + (number == 2))
        asyncio.run(life(tmp_path, replace(config, train=train), 2 + 3 * number))
    log = tmp_path / "run" / "log"
    notes = [record.message for record in read_records(log) if isinstance(record.message, Note)]
    assert [note.data["config"] for note in notes if note.what in ("run", "resumed")] == [1, 2, 3]
    steps = read_history(log).steps
    numbers = [step.config for step in steps]
    assert numbers == sorted(numbers)
    assert set(numbers) == {1, 2, 3}
    second = numbers.index(2)
    planned = plan(log, (), None, None)
    assert planned.said == (
        f"steps 0 to {second - 1} were trained with other settings (config-1.yaml: lr 0.5, now 0.25), and so here",
    )
    rates: list[float] = []
    monkeypatch.setattr(trainer, "LAST_WORDS_S", 1.0)  # the next ones are there by then
    compared = asyncio.run(train_again(planned, Nobody(), asked(scripted(step_s=0.3), rates)))
    assert rates == [0.5, 0.25]
    assert [each.step for each in compared] == list(range(len(steps)))
    assert {value for each in compared for value in each.differences().values()} == {0.0}
    assert plan(log, ("train.lr=0.5",), None, None).said == ()  # what is asked for counts for all steps
