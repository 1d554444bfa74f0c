"""The trainer again, on scripted ranks: what it is sent, what is compared, and how it ends."""

import asyncio
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from areal_async.config_file import load_config
from areal_async.controller import Controller
from areal_async.errors import LogError, TrainerError
from areal_async.log import format as fmt
from areal_async.log import payloads
from areal_async.log.reader import index_payloads
from areal_async.messages import TrainerConnection
from areal_async.replay.answers import Compared, over
from areal_async.replay.history import read_history
from areal_async.replay.trainer import Nobody, Plan, plan, train_again
from areal_async.testing.recipes import scripted
from areal_async.testing.small_run import write_small_run
from areal_async.testing.trainer import Die, Fail, ScriptedRank, Skip, TrainerOrder

from ..waiting import wait_until

pytestmark = pytest.mark.slow

STEPS = 10

Orders = Sequence[Sequence[TrainerOrder]]


class Watcher(Nobody):
    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.steps: list[int] = []
        self.published: list[int] = []  # files of published weights, of all
        self._others = set(os.listdir("/dev/shm"))

    def starting(self, version: int, ranks: int) -> None:
        self.started.append((version, ranks))

    def step(self, compared: Compared) -> None:
        self.steps.append(compared.step)
        self.published.append(len(set(os.listdir("/dev/shm")) - self._others))


async def live(
    folder: Path, config: Path, orders: Orders = (), *options: str, stop: int = -1, segment_bytes: int = 1 << 28
) -> None:
    """A life of the run in `folder`; a later one goes on with it. stop: after this step."""
    recipes = scripted(books=folder / "books.jsonl", trainer_orders=orders, step_s=0.05)  # a stop comes in time
    loaded, resume = load_config(config, options), (folder / "run").exists()
    loaded = replace(loaded, log=replace(loaded.log, segment_bytes=segment_bytes))
    async with Controller(loaded, run_dir=folder / "run", resume=resume, recipes=recipes) as run:
        async for row in run.steps():
            if row.step == stop:
                run.stop()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps on two ranks, a checkpoint every second step: the trainer dies in step 3 and goes back to version 2;
    after step 4 or so the run is stopped, resumed with one rank, stopped, and resumed with two again."""
    folder = tmp_path_factory.mktemp("recorded")
    config = write_small_run(folder / "small", f"train.steps={STEPS}", "train.ranks=2", "train.minibatches=2")
    asyncio.run(live(folder, config, [[TrainerOrder("train", Die(after=True), 3)]], stop=4))
    asyncio.run(live(folder, config, (), "train.ranks=1", stop=6))
    asyncio.run(live(folder, config))
    return folder


def lines(books: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in books.read_text().splitlines()]


def frames(found: list[dict[str, Any]]) -> dict[tuple[int, int, int], str]:
    """By step, branch and rank."""
    return {(line["step"], line["branch"], line["rank"]): line["frames"] for line in found}


async def again(planned: Plan, watch: Nobody, books: Path | None = None, orders: Orders = ()) -> list[Compared]:
    """And nothing of it is left (processes and shared memory: conftest looks)."""
    with tempfile.TemporaryDirectory(prefix="again-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        try:
            return await train_again(planned, watch, scripted(books=books, trainer_orders=orders))
        finally:
            assert os.listdir(folder) == []


async def test_ranks_get_the_very_frames_that_the_live_ones_got(recorded: Path, tmp_path: Path) -> None:
    """Over a rollback and a resume with another number of ranks; what was done in vain is left out."""
    history = read_history(recorded / "run" / "log")
    ranks = [step.ranks for step in history.steps]
    assert (len(ranks), history.resumes, ranks[0], set(ranks), ranks[-1]) == (STEPS, 2, 2, {2, 1}, 2)
    assert history.discarded == 1
    wanted = {key: digest for key, digest in frames(lines(recorded / "books.jsonl")).items()
              if key[:2] in {(step.step, step.branch) for step in history.steps}}  # fmt: skip
    planned, watch = plan(recorded / "run" / "log", (), None, None), Watcher()
    steps = await again(planned, watch, tmp_path / "books")
    assert frames(lines(tmp_path / "books")) == wanted
    assert len(lines(tmp_path / "books")) == len(wanted)  # each once
    assert watch.steps == [compared.step for compared in steps] == list(range(STEPS))
    first, second = (step for step in range(1, STEPS) if ranks[step] != ranks[step - 1])
    assert watch.started == [(0, 2), (first, 1), (second, 2)]
    # the version before is freed; new ranks have published nothing when their first step is done
    assert watch.published == [int(step not in (first, second)) for step in range(STEPS)]
    assert any("another train.ranks (2, then 1, then 2)" in said for said in planned.said)
    for compared in steps:
        assert list(over(compared, {})) == []
        assert set(compared.differences().values()) == {0.0}  # the state of the scripted weights among them


async def test_from_a_checkpoint_and_so_many_steps(recorded: Path, tmp_path: Path) -> None:
    versions = sorted(int(path.name[5:]) for path in (recorded / "run" / "checkpoints").glob("step-*"))
    first = versions[0]
    planned, watch = plan(recorded / "run" / "log", (), f"step-{first}", 2), Watcher()
    before = sorted(path.stat().st_mtime_ns for path in (recorded / "run").rglob("*"))
    steps = await again(planned, watch, tmp_path / "books")
    assert watch.started[0][0] == first
    assert watch.steps == [first, first + 1]
    assert set(steps[-1].differences().values()) == {0.0}
    assert sorted(path.stat().st_mtime_ns for path in (recorded / "run").rglob("*")) == before


async def test_a_token_that_was_changed_is_found_at_its_step(recorded: Path, tmp_path: Path) -> None:
    """With its checksum made right again."""
    copy = tmp_path / "run"
    shutil.copytree(recorded / "run", copy)
    book = next(line for line in lines(recorded / "books.jsonl") if line["step"] == 6 and line["rank"] == 0)
    change_a_token(copy / "log", book["samples"][-1])
    steps = await again(plan(copy / "log", (), None, None), Watcher())
    (found,) = [difference for compared in steps for difference in over(compared, {})]
    assert (found.step, found.field) == (6, "entropy")


def change_a_token(log: Path, sample: str) -> None:
    for header, ref in index_payloads(log):
        if header.sample == sample:
            payload = payloads.read(log, ref)
            payload.arrays[0][-1] += 1
            with fmt.payload_path(log, ref.segment).open("r+b") as file:
                file.seek(ref.offset)
                file.write(b"".join(payloads.encode(payload.sample, payload.attempt, payload.arrays)))


async def test_an_update_that_is_left_out_now_is_a_difference(recorded: Path) -> None:
    orders = [[TrainerOrder("train", Skip(), 1)]]
    steps = await again(plan(recorded / "run" / "log", (), None, 3), Watcher(), orders=orders)
    (found,) = [difference for compared in steps for difference in over(compared, {})]
    assert str(found) == "step 1: skipped: recorded: no; now: minibatch 1 of 1: loss is not finite"


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (TrainerOrder("train", Die(), 2), "came as far as version 2: .*exit code 7"),
        (TrainerOrder("train", Fail(), 2), "came as far as version 2: step 2: .*by script"),
        (TrainerOrder("publish", Fail(), 1), "came as far as version 1: version 1 was not published: .*by script"),
    ],
)
async def test_ranks_that_fail(recorded: Path, order: TrainerOrder, why: str) -> None:
    watch = Watcher()
    with pytest.raises(TrainerError, match=f"(?s){why}"):
        await again(plan(recorded / "run" / "log", (), None, None), watch, orders=[[order]])
    assert watch.steps == list(range(order.at or 0))


async def test_cancelled_in_the_middle(recorded: Path) -> None:
    class Cancel(Watcher):
        def step(self, compared: Compared) -> None:
            if compared.step == 2:
                task.cancel()

    task = asyncio.ensure_future(again(plan(recorded / "run" / "log", (), None, None), Cancel()))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_ranks_from_elsewhere(recorded: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With `train.listen` they are started by hand, as for the run."""
    planned, watch = plan(recorded / "run" / "log", ("train.listen=tcp://127.0.0.1:0",), None, 2), Watcher()

    def by_hand() -> None:
        def written() -> list[Path]:
            there = Path(tempfile.gettempdir()).glob("areal-*/connect.json")
            return [path for path in there if path.stat().st_size]  # and not just begun

        wait_until(lambda: bool(written()), 60)
        there = msgspec.json.decode(written()[0].read_bytes(), type=TrainerConnection)
        ranks = [ScriptedRank(rank, there.ranks, there.spec, 0.0, None) for rank in range(there.ranks)]
        hands = [
            threading.Thread(target=rank.serve, args=(there.address, there.secret, there.public_key)) for rank in ranks
        ]
        for hand in hands:
            hand.start()
        for hand in hands:
            hand.join()

    steps, _ = await asyncio.gather(again(planned, watch), asyncio.to_thread(by_hand))
    assert watch.steps == [0, 1]
    assert "waiting for 2 trainer rank(s)" in caplog.text
    assert {value for compared in steps for value in compared.differences().values()} == {0.0}


async def test_arrays_that_are_damaged(recorded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(recorded / "run", copy)
    planned = plan(copy / "log", (), None, None)
    for path in (copy / "log").glob("payload-*"):
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
    with pytest.raises(LogError, match="corrupt record at offset"):
        await again(planned, Watcher())


async def test_a_run_whose_early_arrays_were_deleted_begins_at_a_checkpoint(tmp_path: Path) -> None:
    """Small segments, so that they go as soon as no checkpoint needs them."""
    await live(tmp_path, write_small_run(tmp_path / "small"), segment_bytes=300)
    log, config = tmp_path / "run" / "log", tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("segment_bytes: 300", "segment_bytes: 65536"))  # 300 isn't allowed
    with pytest.raises(LogError, match="--from model: step 0 can't be trained again"):
        plan(log, (), "model", None)
    planned, watch = plan(log, (), None, None), Watcher()
    assert planned.version == int(str(planned.checkpoint).rpartition("-")[2]) > 0
    assert "it begins with the checkpoint of version" in planned.said[0]
    steps = await again(planned, watch)
    assert watch.steps == list(range(planned.version, 6))
    assert {value for compared in steps for value in compared.differences().values()} == {0.0}
