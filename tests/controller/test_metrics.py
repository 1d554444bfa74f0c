"""The figures of a step: lags and masks of a batch, who was busy, what age costs, and what is written of it."""

import asyncio
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.config import Config
from areal_async.controller import Controller, RunResult
from areal_async.controller.metrics import LostByLength, Meter, StepRow, batch_figures
from areal_async.controller.record import Record
from areal_async.controller.samples import Kept, Samples, tokens_by_version
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Evaluate,
    EvaluationDone,
    Failed,
    Forget,
    Joined,
    Lost,
    Published,
    Restart,
    Rules,
    SampleDone,
    Scored,
    StartSample,
    StepDone,
    Swap,
    Swapped,
    Train,
    TrainSample,
    Woke,
)
from areal_async.report import price_of_age
from areal_async.rollout.session import Session
from areal_async.rollout.types import Completion
from areal_async.rollout.workflow import Prompt, Sample, SingleTurn
from areal_async.testing.recipes import scripted

Make = Callable[..., Config]


def kept(versions: list[int], *, others: int = 0, finish: str = "stop", reward: float = 1.0) -> Kept:
    """An answer with these versions, and then so many tokens that the model did not write."""
    mask = [0, 0] + [1] * len(versions) + [0] * others
    sample = Sample(
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=np.array(mask, np.uint8),
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.array([-1, -1, *versions, *[-1] * others], np.int32),
        prompt_tokens=2,
        finish=finish,  # type: ignore[arg-type]
        reward=None,
    )
    return Kept(sample, 0, Prompt([0, 1], "", None, 0, 0), reward)


def train(step: int, samples: list[str], mask_below: int = 0) -> Train:
    entries = tuple(TrainSample(sample, 0, 0.0) for sample in samples)
    return Train(step=step, branch=0, groups=(), samples=entries, minibatches=(), mask_below=mask_below)


def test_the_page_of_metrics_is_up_to_date() -> None:
    tool = Path(__file__).resolve().parents[2] / "tools" / "draw_metrics.py"
    spec = importlib.util.spec_from_file_location("draw_metrics", tool)
    assert spec is not None
    assert spec.loader is not None
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    assert drawing.PAGE.read_text(encoding="utf-8") == drawing.page(), "run: python tools/draw_metrics.py"


# ---------------------------------------------------------------------------------------------------------- a batch


def test_figures_of_a_batch() -> None:
    batch = [kept([3, 3, 4], reward=0.0), kept([5, 5], others=1, finish="length")]
    figures = batch_figures(train(5, ["0.0", "0.1"]), batch, max_staleness=1)
    assert (figures.tokens_trained, figures.tokens_masked, figures.tokens_older) == (5, 0, 2)
    assert (figures.lag_max, figures.lag_mean) == (2, (2 + 2 + 1) / 5)
    assert (figures.mixed_share, figures.versions_per_sample_max) == (0.5, 2)
    assert (figures.reward_mean, figures.response_len_mean, figures.truncated_share) == (0.5, 3.0, 0.5)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=40))
def test_tokens_by_version_against_a_plain_count(tokens: list[tuple[int, bool]]) -> None:
    """Versions may come in any order: after a rollback, or where they were inferred."""
    versions = np.array([version if trained else -1 for version, trained in tokens], np.int32)
    mask = np.array([trained for _, trained in tokens], np.uint8)
    zeros = np.zeros(len(tokens), np.int32)
    sample = Sample(zeros, mask, zeros.astype(np.float32), versions, 0, "stop")
    assert tokens_by_version(sample) == Counter(version for version, trained in tokens if trained)


def test_masked_tokens_have_no_lag() -> None:
    batch = [kept([1, 3, 4]), kept([5, 5])]
    figures = batch_figures(train(5, ["0.0", "0.1"], mask_below=3), batch, max_staleness=2)
    assert (figures.tokens_trained, figures.tokens_masked, figures.tokens_older) == (4, 1, 0)
    assert (figures.lag_max, figures.lag_mean, figures.versions_per_sample_max) == (2, 3 / 4, 3)
    nothing = batch_figures(train(9, ["0.0"], mask_below=7), [kept([1, 3])], max_staleness=2)
    assert (nothing.tokens_trained, nothing.tokens_masked, nothing.lag_max, nothing.lag_mean) == (0, 2, 0, 0.0)
    assert batch_figures(train(9, []), [], max_staleness=2).samples == 0


# ------------------------------------------------------------------------------------------------------- who is busy

Change = tuple[int, str, str, int]
changes = st.lists(
    st.tuples(
        st.integers(0, 5), st.sampled_from(["serving", "load", "training"]), st.sampled_from("ab"), st.integers(0, 2)
    ),
    max_size=30,
)


@given(changes)
def test_the_meter_adds_up_what_a_look_at_every_second_sees(story: list[Change]) -> None:
    """Three servers, one of which never joins. Times are whole seconds, so each can be looked at."""
    meter, now, training = Meter(3), 0, False
    serving: dict[str, bool] = {}
    load: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    trained = both = 0.0
    for elapsed, what, server, value in story:
        for _ in range(elapsed):
            working = [name for name in serving if serving[name] and load[name]]
            busy.update(working)
            trained += training
            both += training * len(working) / 3
        now += elapsed
        if what == "serving":
            serving[server] = value > 0
            meter.serving(now, server, serving=value > 0)
        elif what == "load":
            change = value - load[server]
            load[server] = value
            meter.load(now, server, change)
        else:
            training = value > 0
            meter.training(now, training=training)
    lap = meter.lap(now)
    whole = max(now, 1)
    assert lap.seconds == now
    assert lap.trainer_idle == pytest.approx(1 - trained / whole)
    assert lap.rollout_idle == pytest.approx(1 - busy.total() / 3 / whole)
    assert lap.both_busy == pytest.approx(both / whole)
    assert lap.by_server == pytest.approx({name: 1 - busy[name] / whole for name in lap.by_server})
    assert meter.total_s == now
    again = meter.lap(now + 1)
    assert again.seconds == 1
    assert 0 <= again.rollout_idle <= 1


# ---------------------------------------------------------------------------------------------------- length and loss


@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=60))
def test_loss_by_length_against_a_plain_count(samples: list[tuple[int, float]]) -> None:
    lost_by = LostByLength()
    for length, lost in samples:
        lost_by.ended(length)
        lost_by.lost(length, lost)
    lengths = sorted(length for length, _ in samples)
    edges = [next(e for e in lengths if sum(x <= e for x in lengths) >= len(lengths) * q / 4) for q in (1, 2, 3)]
    parts: list[list[float]] = [[], [], [], []]
    for length, lost in samples:
        parts[sum(length > edge for edge in edges)].append(lost)
    expected = [sum(part) / len(part) if part else 0.0 for part in parts]
    assert lost_by.quarters() == pytest.approx(expected)


def test_nothing_has_ended_yet() -> None:
    assert LostByLength().quarters() == (0.0, 0.0, 0.0, 0.0)


# ------------------------------------------------------------------------------------------------- a story of events


class Watched:
    """A `Record`, and stand-ins for what it looks at."""

    def __init__(self, folder: Path, **rules: Any) -> None:
        nothing: Any = None
        self.samples = Samples(nothing, nothing)
        self.running: dict[str, int] = {}
        self.tokens_generated = self.requests_again = self.tokens_inferred = 0
        self.stale = self.repeated = 0
        self.rows: list[StepRow] = []
        given = Rules(
            seed=0, steps=9, batch_groups=1, group_size=1, max_staleness=2, max_concurrent=9, minibatches=1, ranks=1,
            max_tokens_per_microbatch=99, max_new_tokens=99, **rules,
        )  # fmt: skip
        stand_in: Any = self
        self.record = Record(
            folder / "rows", given, stand_in, self.samples, stand_in, stand_in, Meter(2), self.rows.append
        )

    def tokens_so_far(self, sample: str) -> int:
        return self.samples[sample].length if sample in self.samples else self.running.get(sample, 0)

    def balance(self) -> dict[str, int]:
        return {"samples_stale": self.stale}

    def waiting(self, now: float) -> str:
        return "step 0 waits"

    def tell(self, *told: AnyEvent | list[AnyCommand]) -> None:
        for event, commands in zip(told[::2], told[1::2], strict=True):
            assert not isinstance(event, list)
            assert isinstance(commands, list)
            self.record.seen(event, commands)

    def step(self, step: int, at: float) -> StepRow:
        self.tell(StepDone(at=at, step=step, branch=0, metrics={"kl_ref": 0.25}), [])
        return self.rows[-1]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """watch(when_older="drop")."""
    with ExitStack() as stack:

        def begin(**rules: Any) -> Watched:
            watched = Watched(tmp_path, **rules)
            stack.callback(watched.record.close)
            return watched

        yield begin


def start(sample: str, server: str) -> StartSample:
    return StartSample(sample=sample, attempt=0, position=0, server=server, floor=0)


def done(at: float, sample: str, length: int) -> SampleDone:
    return SampleDone(
        at=at, sample=sample, attempt=0, oldest=0, newest=0, prompt_tokens=2, length=length, loss_tokens=length,
        finish="stop",
    )  # fmt: skip


def published(at: float, version: int) -> Published:
    return Published(at=at, version=version, branch=0, location="", nbytes=1)


def swapped(at: float, server: str, version: int) -> Swapped:
    return Swapped(at=at, server=server, version=version, branch=0, pause_s=0.5)


def test_what_is_dropped_for_its_age(watch: Callable[..., Watched]) -> None:
    """Finished, unfinished and never begun; what the same event ended otherwise is not stale."""
    watched = watch(when_older="drop")
    watched.samples |= {"0.0": kept([0, 0]), "1.0": kept([0] * 10), "2.0": kept([0] * 7), "5.0": kept([0] * 4)}
    watched.running = {"3.0": 30, "4.0": 0}
    watched.tell(published(1.0, 0), [])
    for sample in ("0.0", "1.0", "2.0", "5.0"):
        watched.tell(done(2.0, sample, watched.samples[sample].length), [])
    watched.stale = 3
    watched.tell(
        Scored(at=3.0, sample="2.0", attempt=0, verdict="right", reward=1.0),
        [
            Cancel(sample="5.0", attempt=0),  # while it was checked: the core has it forgotten too, counted once
            Forget(samples=("2.0", "5.0")),
            train(0, ["0.0"]),
            Cancel(sample="3.0", attempt=0),
            Cancel(sample="4.0", attempt=0),
            Cancel(sample="1.0", attempt=0),
            Forget(samples=("1.0",)),
        ],
    )
    row = watched.step(0, 4.0)
    assert (row.samples_stale, row.tokens_stale) == (3, 40)
    assert row.tokens_discarded == 7 + 4
    assert row.trainer_wait_s == 2.0
    assert row.lost_by_length == (0.0, 0.0, 1.0, 1.0)  # of 2, 4, 7, 10 and 30 tokens the last two
    assert row.kl_ref == 0.25
    watched.tell(published(4.5, 1), [train(1, ["0.0"])])
    row = watched.step(1, 5.0)
    assert (row.samples_stale, row.tokens_stale, row.tokens_discarded, row.trainer_wait_s) == (0, 0, 0, 0.0)
    assert watched.record.totals.tokens_stale == 40


def test_what_masks_cost_by_length(watch: Callable[..., Watched]) -> None:
    """Half of the longest answer is masked; the same batch after a rollback costs nothing more."""
    watched = watch(when_older="mask")
    watched.samples |= {f"{n}.0": kept([5] * (n + 1)) for n in range(3)} | {"3.0": kept([1] * 4 + [5] * 4)}
    for sample, one in watched.samples.items():
        watched.tell(done(1.0, sample, one.length), [])
    batch = train(5, list(watched.samples), mask_below=3)
    for _ in range(2):
        watched.tell(published(2.0, 5), [batch])
        row = watched.step(5, 3.0)
        assert (row.tokens_masked, row.tokens_trained, row.lost_by_length) == (4, 10, (0.0, 0.0, 0.0, 0.5))


def test_servers_that_come_and_go(watch: Callable[..., Watched]) -> None:
    """Server 0 serves from 1 s on, swaps from 5 to 6 s; server 1 serves from 2 s on, is lost at 4 s, and from 7 s on is
    there again with nothing to do: its samples go on elsewhere. From 9 s on it has a new one."""
    watched = watch()
    watched.samples["0.0"] = kept([0])
    watched.tell(
        swapped(1.0, "0", 0), [start("0.0", "0"), start("1.0", "1"), start("2.0", "1")],
        swapped(2.0, "1", 0), [],
        Lost(at=4.0, peer="server", id="1", why=""), [],
        Failed(at=4.0, of="sample", id="1.0", why=""), [Restart(peer="server", id="1", why=""), start("1.0", "0")],
        done(5.0, "0.0", 1), [Swap(server="0", version=1, branch=0, location="")],
        swapped(6.0, "0", 1), [train(0, ["0.0"])],
        swapped(7.0, "1", 1), [],
        done(8.0, "1.0", 1), [Evaluate(version=1, server="0")],
        EvaluationDone(at=9.0, version=1, server="0", score=0.5, n=1, tokens=1, seconds=1.0), [start("3.0", "1")],
        done(9.5, "2.0", 1), [],
    )  # fmt: skip
    watched.requests_again, watched.tokens_inferred = 2, 30
    row = watched.step(0, 10.0)
    assert row.rollout_idle_by_server == pytest.approx({"0": 1 - 7 / 10, "1": 1 - 3 / 10})
    assert row.rollout_idle_share == pytest.approx(1 - 10 / 20)
    assert row.both_busy_share == pytest.approx(4 / 20)
    assert (row.restarts, row.continued, row.tokens_inferred, row.swap_pause_s) == (1, 2, 30, 2.0)


def test_reward_workers_that_come_and_go(watch: Callable[..., Watched]) -> None:
    watched = watch()
    watched.samples["0.0"] = kept([0])
    watched.tell(
        Lost(at=1.0, peer="rewards", id="rewards.0", why=""), [],
        Woke(at=2.0), [Restart(peer="rewards", id="rewards.0", why="")],
        Joined(at=3.0, peer="rewards", id="rewards.0"), [train(0, ["0.0"])],
    )  # fmt: skip
    watched.repeated = 3
    row = watched.step(0, 4.0)
    assert (row.reward_restarts, row.checks_again, row.restarts) == (1, 3, 0)
    watched.tell(published(5.0, 1), [train(1, ["0.0"])])
    row = watched.step(1, 6.0)
    assert (row.reward_restarts, row.checks_again) == (0, 0)


# --------------------------------------------------------------------------------------------------------- whole runs


class TwoTurns:
    """The first prompt's answers stand still after some tokens until `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.early = 0

    async def run(self, session: Session, prompt: Prompt) -> Sample:
        if prompt.position != 0:
            return await SingleTurn().run(session, prompt)
        short = msgspec.structs.replace(session.sampling, max_tokens=5, stop_token_ids=())
        first = await session.generate(prompt.token_ids, short)
        self.early += len(first.token_ids)
        await self.go.wait()
        second = await session.generate([*prompt.token_ids, *first.token_ids.tolist()], short)
        both = Completion(
            token_ids=np.concatenate([first.token_ids, second.token_ids]),
            logprobs=np.concatenate([first.logprobs, second.logprobs]),
            versions=np.concatenate([first.versions, second.versions]),
            finish_reason="stop",
        )
        return Sample.single(prompt.token_ids, both)


async def run_with_a_late_group(config: Config) -> RunResult:
    """Group 0 has 10 tokens of version 0, and goes on after step 3 (η is 1)."""
    workflow = TwoTurns()
    async with Controller(config, workflow=workflow, recipes=scripted(step_s=0.02)) as run:
        async for row in run.steps():
            assert workflow.early == 10
            if row.step == 3:
                workflow.go.set()
        return run.result()


LATE = ("train.steps=10", "rollout.max_staleness=1")


@pytest.mark.slow
async def test_a_run_that_drops_says_what_it_dropped(make_config: Make) -> None:
    result = await run_with_a_late_group(make_config(*LATE, "rollout.when_older=drop"))
    rows = result.rows
    stale = rows[-1].ledger["stale"]  # group 0, and others where the machine was slow
    assert sum(row.samples_stale for row in rows) == 2 * stale >= 2
    assert sum(row.tokens_stale for row in rows) >= 10
    assert stale > 1 or [row.tokens_stale for row in rows if row.tokens_stale] == [10]
    assert all(row.lag_max <= 1 and row.tokens_older == row.tokens_masked == 0 for row in rows)
    assert max(rows[-1].lost_by_length) > 0
    assert sum(row.trainer_wait_s for row in rows) > 0
    assert f"{2 * stale} samples were dropped with {sum(row.tokens_stale for row in rows)} tokens" in price_of_age(rows)


@pytest.mark.parametrize("when_older", ["mask", pytest.param("train", marks=pytest.mark.slow)])
@pytest.mark.slow
async def test_a_run_with_older_tokens_counts_them(make_config: Make, when_older: str) -> None:
    result = await run_with_a_late_group(make_config(*LATE, f"rollout.when_older={when_older}"))
    rows = result.rows
    masked, older = (sum(getattr(row, name) for row in rows) for name in ("tokens_masked", "tokens_older"))
    if when_older == "mask":
        assert (masked >= 10, older) == (True, 0)
        assert max(row.lag_max for row in rows) <= 1
        assert "of the tokens got no gradient; lost of each quarter of answer length" in price_of_age(rows)
        assert max(rows[-1].lost_by_length) > 0
    else:
        assert (masked, older >= 10) == (0, True)
        assert max(row.lag_max for row in rows) >= 4
        assert "of the trained tokens were older than η" in price_of_age(rows)
        assert max(rows[-1].lost_by_length) == 0
    assert all(row.samples_stale == row.tokens_stale == 0 for row in rows)
