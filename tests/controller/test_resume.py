"""Runs that are killed, stopped, moved and resumed: scripted peers in real processes, which keep books of their own."""

import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_async.cli import main
from areal_async.config import Config
from areal_async.config_file import load_config
from areal_async.controller import Controller, resuming
from areal_async.controller.checkpoints import read_state
from areal_async.controller.crew import Crew
from areal_async.controller.metrics import StepRow
from areal_async.controller.runfolder import RunFolder
from areal_async.controller.samples import Samples
from areal_async.errors import ArealError
from areal_async.log import format as fmt
from areal_async.log.reader import read_records
from areal_async.messages import (
    Command,
    Event,
    Note,
    RolledBack,
    SampleDone,
    Scored,
    StartSample,
)
from areal_async.rollout.workflow import Prompt
from areal_async.testing.books import read_trainer, surviving
from areal_async.testing.crash import Life, Point
from areal_async.testing.lives import LifeEnd, live
from areal_async.testing.recipes import scripted
from areal_async.testing.small_run import write_small_run

KILLED = -signal.SIGKILL


class Lives:
    """The lives of one run in a folder. options: differences from `small_run`'s six steps of two prompts × two."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.config = write_small_run(folder, *options)
        self.run = folder / "run"
        self.books = folder / "books.jsonl"
        self.server_book = folder / "server-book.jsonl"

    def live(self, point: Point | None = None, *, resume: bool = False, step_s: float = 0.0) -> LifeEnd:
        life = Life(
            config=str(self.config), run_dir=str(self.run), resume=resume, point=point, books=str(self.books),
            server_book=str(self.server_book), step_s=step_s,
        )  # fmt: skip
        return live(life)

    def change(self, *overrides: str) -> Config:
        """The configuration with other options, for the lives that follow."""
        from areal_async.config_file import dump_config

        config = load_config(self.config, overrides)
        self.config.write_text(dump_config(config))
        return config

    def trained(self) -> list[dict[str, Any]]:
        """What every rank has trained, in the order in which it was."""
        return [json.loads(line) for line in self.books.read_text().splitlines()]

    def messages(self) -> list[Any]:
        return [record.message for record in read_records(self.run / "log")]

    def rows(self) -> list[StepRow]:
        lines = (self.run / "metrics.jsonl").read_bytes().splitlines()
        return [msgspec.json.decode(line, type=StepRow) for line in lines]


@pytest.fixture
def lives(tmp_path: Path) -> Lives:
    return Lives(tmp_path / "r")


def killed(lives: Lives, place: str = "sent", number: int = 4) -> None:
    """The first life ends in the middle of step `number` − 1."""
    assert lives.live(Point(place, number)).code == KILLED


def resumed(lives: Lives, **options: Any) -> None:
    end = lives.live(resume=True, **options)
    assert end.code == 0, end.said


def batches(lives: Lives) -> dict[int, set[int]]:
    """Groups of each step of the history that survived."""
    found: dict[int, set[int]] = {}
    for line in surviving(read_trainer(lives.books)):
        found.setdefault(line.step, set()).update(line.groups)
    return found


def positions(lives: Lives) -> dict[int, int]:
    """Place in the data order of each group."""
    return {m.group: m.position for m in lives.messages() if type(m).__name__ == "ReadGroup"}


# ------------------------------------------------------------------------------------------------------ what goes on


@pytest.mark.slow
def test_after_kill_9_steps_are_trained_again_with_the_same_batches_and_nothing_is_lost(lives: Lives) -> None:
    """Killed while step 3 is trained, with a checkpoint of version 2."""
    killed(lives)
    graded = {m.sample for m in lives.messages() if isinstance(m, Scored)}
    before = len(lives.server_book.read_bytes())
    resumed(lives)
    lines = lives.trained()
    done = [(line["step"], line["branch"]) for line in lines if (line["step"], line["branch"]) != (3, 0)]
    # the ranks had been sent step 3: whether they came to it before they were ended, nobody can know
    assert done == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 1), (4, 1), (5, 1)]
    first = {line["step"]: line for line in lines if line["branch"] == 0}
    for line in lines:
        if line["branch"] == 1 and line["step"] in first:
            once = first[line["step"]]  # samples, advantages, arrays' checksum, weights; frames tell the branch, too
            assert {**line, "branch": 0, "frames": once["frames"]} == once
    trained = [sample for line in surviving(read_trainer(lives.books)) for sample in line.samples]
    assert len(trained) == len(set(trained)) == 6 * 2 * 2
    asked = [json.loads(line) for line in lives.server_book.read_bytes()[before:].splitlines()]
    again = {entry["request_id"].partition("-")[0] for entry in asked} & graded
    assert not again, f"graded, and generated again: {again}"
    assert (lives.run / "model" / "version").read_text() == "6"


@pytest.mark.slow
def test_the_data_order_is_that_of_a_run_without_a_stop_at_an_epochs_end_too(tmp_path: Path) -> None:
    """η = 0, so a plain loop: positions 0, 1, 2, … in steps of 2; 5 rows an epoch, killed twice around its end."""
    lives = Lives(tmp_path / "r", "rollout.max_staleness=0", "train.steps=8", "data.epochs=4")
    data = (tmp_path / "r" / "train.jsonl").read_text().splitlines(keepends=True)[:5]
    (tmp_path / "r" / "train.jsonl").write_text("".join(data))
    killed(lives, "sent", 3)  # step 2: positions 4 and 5, on both sides of the border
    assert lives.live(Point("sent", 4), resume=True).code == KILLED
    resumed(lives)
    place = positions(lives)
    found = {step: sorted(place[group] for group in groups) for step, groups in batches(lives).items()}
    assert found == {step: [2 * step, 2 * step + 1] for step in range(8)}


@pytest.mark.slow
def test_what_waits_in_the_buffer_is_trained_after_a_resume_and_the_run_ends_with_the_data(tmp_path: Path) -> None:
    """P08: prompts 0..7, a batch of 2, killed after the first was trained, while others are finished."""
    lives = Lives(
        tmp_path / "r", "train.steps=4", "data.epochs=1", "checkpoint.every_steps=1", "rollout.max_staleness=4"
    )
    data = (tmp_path / "r" / "train.jsonl").read_text().splitlines(keepends=True)[:8]
    (tmp_path / "r" / "train.jsonl").write_text("".join(data))
    killed(lives, "sent", 2)
    resumed(lives)
    place = positions(lives)
    trained = [place[group] for groups in batches(lives).values() for group in groups]
    assert sorted(trained) == list(range(8))


@pytest.mark.slow
def test_a_resume_that_is_killed_can_be_resumed(lives: Lives) -> None:
    killed(lives)
    for place in ("reading", "going back", "sent"):
        assert lives.live(Point(place, 1), resume=True).code == KILLED
    resumed(lives)
    trained = [sample for line in surviving(read_trainer(lives.books)) for sample in line.samples]
    assert len(trained) == len(set(trained)) == 6 * 2 * 2
    assert [row.branch for row in lives.rows()][-1] >= 2
    steps: list[int] = []
    for row in lives.rows():
        steps = [step for step in steps if step < row.step] + [row.step]
    assert steps == list(range(6))


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_back(tmp_path: Path) -> None:
    lives = Lives(tmp_path / "r", "train.ranks=2")
    assert lives.live(Point("sent", 7)).code == KILLED  # step 3, of two ranks
    lives.change("train.ranks=1")
    assert lives.live(Point("sent", 2), resume=True).code == KILLED
    lives.change("train.ranks=2")
    resumed(lives)
    by_step: dict[tuple[int, int], set[str]] = {}
    for line in lives.trained():
        by_step.setdefault((line["step"], line["branch"]), set()).update(line["samples"])
    assert by_step[2, 0] == by_step[2, 1] == by_step[2, 2]
    trained = [sample for line in surviving(read_trainer(lives.books)) for sample in line.samples]
    assert len(trained) == len(set(trained)) == 6 * 2 * 2


@pytest.mark.slow
async def test_a_run_folder_can_be_moved(lives: Lives, tmp_path: Path) -> None:
    """And the result's rows are those of the history that survived, before the kill too."""
    killed(lives)
    moved = tmp_path / "elsewhere" / "run"
    moved.parent.mkdir()
    shutil.move(lives.run, moved)
    config = load_config(lives.config)
    async with Controller(config, run_dir=moved, resume=True, recipes=scripted(books=lives.books)) as run:
        result = await run.run()
    assert (result.folder, result.steps) == (moved, 6)
    assert (moved / "model" / "version").read_text() == "6"
    assert [(row.step, row.branch) for row in result.rows] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (5, 1)]


@pytest.mark.slow
async def test_a_run_that_was_stopped_goes_on_from_its_last_step(tmp_path: Path) -> None:
    """Stopped on request there is a checkpoint of the last step, so nothing is trained again; the clock, the rows and
    the branch go on. More steps than before may be asked for."""
    config_path = write_small_run(tmp_path / "r", "train.steps=20", "checkpoint.every_steps=10")
    books = tmp_path / "books.jsonl"
    async with Controller(load_config(config_path), recipes=scripted(books=books, step_s=0.02)) as run:
        async for row in run.steps():
            if row.step == 2:
                run.stop()
        first = run.result()
    assert first.reason == "stopped"
    config = load_config(config_path, ("train.steps=22",))
    async with Controller(config, resume=True, recipes=scripted(books=books)) as run:
        second = await run.run()
    assert (second.reason, second.folder) == ("steps_done", first.folder)
    assert second.steps == len(second.rows) == 22
    assert [row.branch for row in second.rows] == [0] * first.steps + [1] * (22 - first.steps)
    times = [row.time_s for row in second.rows]
    assert times == sorted(times)
    assert all(row.step_s < second.seconds - first.seconds for row in second.rows[first.steps :])
    assert len(books.read_text().splitlines()) == second.steps
    assert yaml_steps(second.folder / "config-1.yaml") == 20
    assert yaml_steps(second.folder / "config.yaml") == second.steps


def yaml_steps(path: Path) -> int:
    return load_config(path).train.steps


@pytest.mark.slow
async def test_a_run_that_failed_goes_on_when_the_cause_is_gone(tmp_path: Path) -> None:
    config = load_config(write_small_run(tmp_path / "r", "rollout.retries=0"))

    class Broken:
        async def run(self, session: Any, prompt: Prompt) -> Any:
            if prompt.position > 5:
                raise ZeroDivisionError("the workflow's own mistake")
            from areal_async.rollout.workflow import SingleTurn

            return await SingleTurn().run(session, prompt)

    books = tmp_path / "books.jsonl"
    with pytest.raises(ArealError, match="the workflow's own mistake"):
        async with Controller(config, workflow=Broken(), recipes=scripted(books=books)) as run:
            await run.run()
    config = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, max_failures=100))
    async with Controller(config, resume=True, recipes=scripted(books=books)) as run:
        result = await run.run()
    assert (result.reason, result.steps) == ("steps_done", 6)
    trained = [sample for line in surviving(read_trainer(books)) for sample in line.samples]
    assert len(trained) == len(set(trained)) == 6 * 2 * 2


@pytest.mark.slow
def test_after_a_loss_of_power_arrays_may_be_gone_that_the_log_tells_of(lives: Lives) -> None:
    killed(lives, number=2)  # before a checkpoint: what one relies on was synced
    *_, last = (record for record in read_records(lives.run / "log") if isinstance(record.message, SampleDone))
    assert last.payload is not None
    os.truncate(fmt.payload_path(lives.run / "log", last.payload.segment), last.payload.offset + 20)
    end = lives.live(resume=True)
    assert end.code == 0, end.said
    assert f"cut at offset {last.offset} of" in end.said
    trained = [sample for line in surviving(read_trainer(lives.books)) for sample in line.samples]
    assert len(trained) == len(set(trained)) == 6 * 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 40, 200])
def test_a_run_that_was_killed_before_its_first_event_begins(lives: Lives, number: int) -> None:
    """Nothing of the log is there, a part of the rules, the rules without what the run is known again by."""
    assert lives.live(Point("record", 1)).code == KILLED
    with (lives.run / "log" / "decisions.log").open("r+b") as file:
        file.truncate(number)
    resumed(lives)
    assert (lives.run / "model" / "version").read_text() == "6"
    assert [m.data["name"] for m in lives.messages() if isinstance(m, Note) and m.what == "run"] == ["small"]


@pytest.mark.slow
def test_a_run_whose_model_was_not_saved_in_the_end_is_resumed(lives: Lives) -> None:
    assert lives.live().code == 0
    *_, (last, _, offset) = read_records(lives.run / "log")
    assert isinstance(last, Note)
    os.truncate(lives.run / "log" / "decisions.log", offset)
    shutil.rmtree(lives.run / "model")
    resumed(lives)
    assert (lives.run / "model" / "version").read_text() == "6"
    assert [line["step"] for line in lives.trained()] == [0, 1, 2, 3, 4, 5, 4, 5]


@pytest.mark.slow
def test_metrics_and_the_log_read_as_if_one_controller_had_written_them(lives: Lives) -> None:
    """Every event of the log has all of its commands, also the one that the kill cut; a torn row is cut."""
    killed(lives)
    records = list(read_records(lives.run / "log"))
    cut = max(
        after.offset
        for event, after in itertools.pairwise(records)
        if isinstance(event.message, Event) and isinstance(after.message, Command)
    )
    os.truncate(lives.run / "log" / "decisions.log", cut)
    with (lives.run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "vers')
    resumed(lives)
    assert all(row.step < 6 for row in lives.rows())
    resumes = [m for m in lives.messages() if isinstance(m, RolledBack)]
    assert len(resumes) == 1
    past = resuming.read(lives.run / "log", Samples(nothing_read, nothing_read))
    assert past is not None
    assert past.missing == ()
    assert past.saved
    at = [m.at for m in lives.messages() if hasattr(m, "at")]
    assert at[-1] == max(at)


def nothing_read(*_: object) -> Any:
    raise AssertionError("nothing is asked for while the log is read")


# -------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.slow
def test_a_finished_run_is_not_resumed(lives: Lives, capfd: pytest.CaptureFixture[str]) -> None:
    assert lives.live().code == 0
    assert main(["run", str(lives.config), "--run-dir", str(lives.run), "--resume"]) == 2
    said = capfd.readouterr().err
    assert said.strip() == f"{lives.run}: all steps are done: nothing to resume; the model is in {lives.run / 'model'}"
    assert main(["run", str(lives.config), "--run-dir", str(lives.run)]) == 2
    assert "or --resume to go on with the run that is in it" in capfd.readouterr().err


@pytest.mark.slow
async def test_another_configuration_other_data_and_another_model_are_refused(lives: Lives, tmp_path: Path) -> None:
    killed(lives)
    before = (lives.run / "log" / "decisions.log").read_bytes()
    for override, told in {
        "train.batch_groups=4": "train.batch_groups was 2 and can't become 4 by a resume: every step so far",
        "rollout.group_size=4": "rollout.group_size was 2 and can't become 4",
        "seed=8": "seed was 7 and can't become 8",
        "train.steps=5": "train.steps was 6 and can't become 5 by a resume: there can only be more",
        "data.shuffle=false": "data.shuffle: True before, False now",
        "data.epochs=3": "data.epochs: None before, 3 now",
        "model.dtype=bfloat16": "model.dtype: float32 before, bfloat16 now",
    }.items():
        assert told in await refusal(load_config(lives.config, (override,)), lives.run)
    data = lives.folder / "train.jsonl"
    kept = data.read_text()
    data.write_text(kept.replace('"answer": "8"', '"answer": "9"'))
    assert "data.train: other files" in await refusal(load_config(lives.config), lives.run)
    data.write_text(kept)
    (lives.folder / "model" / "model.safetensors").write_bytes(b"another")
    assert "model.path: other files" in await refusal(load_config(lives.config), lives.run)
    (lives.folder / "model" / "model.safetensors").write_bytes(b"")
    assert (lives.run / "log" / "decisions.log").read_bytes() == before
    # the same files in another place are the same
    shutil.move(data, tmp_path / "moved.jsonl")
    lives.change(f"data.train=[{tmp_path / 'moved.jsonl'}]")
    resumed(lives)


async def refusal(config: Config, run_dir: Path | None) -> str:
    """What is said when a resume is refused; at once, and leaving nothing behind."""
    with pytest.raises(ArealError) as error:
        async with Controller(config, run_dir=run_dir, resume=True, recipes=scripted()):
            pass
    return str(error.value)


async def test_a_folder_without_a_run_is_refused(make_config: Any, tmp_path: Path) -> None:
    config = make_config()
    assert f"{tmp_path}: no run is in this folder" in await refusal(config, tmp_path)
    assert "there is no run scripted-… to resume" in await refusal(config, None)


def test_the_newest_run_of_the_name_is_resumed(make_config: Any, tmp_path: Path) -> None:
    for name in ("scripted-20260101-000000", "scripted-20260101-000000-2", "scripted-20260101-000000-10",
                 "scripted-b-20270101-000000", "other-20270101-000000", "scripted-20260102-000000x"):  # fmt: skip
        (tmp_path / "runs" / name / "log").mkdir(parents=True)
        (tmp_path / "runs" / name / "log" / "decisions.log").touch()
    (tmp_path / "runs" / "scripted-20280101-000000").mkdir()  # nothing is in it
    assert RunFolder.find(make_config(), None).name == "scripted-20260101-000000-10"


@pytest.mark.slow
async def test_a_second_controller_is_refused_while_the_first_one_runs(make_config: Any) -> None:
    async with Controller(make_config("train.steps=500"), recipes=scripted(step_s=0.02)) as run:
        async for row in run.steps():
            if row.step == 1:
                said = await refusal(make_config("train.steps=500"), run.folder)
                assert f"process {os.getpid()} is writing this log" in said
                run.stop()


@pytest.mark.slow
async def test_a_corrupt_log_is_refused_with_its_place(lives: Lives) -> None:
    killed(lives)
    path = lives.run / "log" / "decisions.log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    said = await refusal(load_config(lives.config), lives.run)
    assert str(path) in said
    assert "corrupt record at offset" in said


@pytest.mark.slow
async def test_a_log_that_this_version_would_not_have_written_is_refused_with_the_first_difference(
    lives: Lives,
) -> None:
    killed(lives)
    folder = lives.run / "log"
    records = list(read_records(folder))
    shutil.rmtree(folder)
    from areal_async.log.writer import RunLog

    log = RunLog(folder, 1 << 20)
    changed = 0
    for message, _, _ in records:
        if isinstance(message, StartSample) and not changed:
            changed += 1
            message = msgspec.structs.replace(message, floor=1)
        log.append(message)
    log.flush()
    log.close()
    said = await refusal(load_config(lives.config), lives.run)
    assert "floor=1" in said
    assert "floor=0" in said
    assert "made by another version of areal-async, or the log was changed" in said


# ---------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.slow
def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    lives = Lives(tmp_path / "r", "checkpoint.every_steps=1", "checkpoint.keep=2")
    assert lives.live().code == 0
    folders = sorted((lives.run / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step-4", "step-5"]
    state = read_state(folders[1])
    assert state is not None
    assert (state.run, state.version, state.branch) == ("small", 5, 0)
    assert 0 < state.log_bytes <= (lives.run / "log" / "decisions.log").stat().st_size
    assert list(state.files) == ["rank-0.json"]


@pytest.mark.slow
async def test_what_was_not_removed_in_time_is_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Crew, "start", late(Crew.start))
    config = load_config(write_small_run(tmp_path / "r", "checkpoint.every_steps=1", "checkpoint.keep=2"))
    async with Controller(config, recipes=scripted()) as run:
        result = await run.run()
    assert sorted(path.name for path in (result.folder / "checkpoints").iterdir()) == ["step-4", "step-5"]


def late(start: Any) -> Any:
    """Tasks that remove checkpoints never come to it."""

    def starts(crew: Crew, work: Any, name: str) -> Any:
        if name.startswith("checkpoints beside"):
            work.close()
            return None
        return start(crew, work, name)

    return starts


@pytest.mark.slow
def test_a_checkpoint_that_is_not_whole_is_not_used(tmp_path: Path) -> None:
    """The newest without its marker, or with a file that was cut: the one before it is taken, and half ones go."""
    lives = Lives(tmp_path / "r", "checkpoint.every_steps=1", "checkpoint.keep=3")
    killed(lives, "sent", 5)
    root = lives.run / "checkpoints"
    (root / "step-4" / "COMPLETE").unlink()
    (root / "step-3" / "rank-0.json").write_text("{")
    (root / ".step-5.tmp-abcd").mkdir()
    resumed(lives)
    backs = [m.to for m in lives.messages() if isinstance(m, RolledBack)]
    assert backs == [2]
    assert not list(root.glob(".*"))


@pytest.mark.slow
async def test_without_any_whole_checkpoint_the_resume_is_refused(tmp_path: Path) -> None:
    lives = Lives(tmp_path / "r", "checkpoint.every_steps=1")
    killed(lives, "sent", 5)
    shutil.rmtree(lives.run / "checkpoints")
    said = await refusal(load_config(lives.config), lives.run)
    assert "of its checkpoints (step-4, step-3) none is whole" in said
