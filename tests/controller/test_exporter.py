"""Prometheus text and TensorBoard: the format, and a whole run looked at from outside while it goes on."""

import logging
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_async.config import Config
from areal_async.controller import Controller, RunResult
from areal_async.controller.evaluating import Evaluation
from areal_async.controller.exporter import Exporter, Family, render
from areal_async.controller.metrics import StepRow
from areal_async.controller.tensorboard import TensorBoard
from areal_async.core.view import View
from areal_async.errors import ConfigError
from areal_async.testing.recipes import scripted

from ..waiting import until

Make = Callable[..., Config]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


# --------------------------------------------------------------------------------------------------------- the format


@given(st.text(), st.text(), st.floats())
def test_any_text_and_number_comes_through(help: str, label: str, value: float) -> None:
    """But for what the format can't hold in a help text: the blanks around it, and a line's other ends."""
    help = "".join(help.split())
    text = render([Family("areal_async_x", "gauge", help, [({"why": label}, value)])])
    family = parsed(text)["areal_async_x"]
    assert (family.type, family.documentation) == ("gauge", help)
    (sample,) = family.samples
    assert sample.labels == {"why": label}
    assert sample.value == value or value != value


def test_names_that_break_the_rules_are_refused() -> None:
    for name, kind in (("x-y", "gauge"), ("1x", "gauge"), ("x_total", "gauge"), ("x", "counter"), ("X", "gauge")):
        with pytest.raises(ValueError, match="is no name of a"):
            Family(name, kind, "", [])  # type: ignore[arg-type]
    assert render([Family("nothing", "gauge", "", [])]) == "\n"


# ------------------------------------------------------------------------------------------------------------ the port


async def test_a_port_in_use_is_known_before_anything_starts(make_config: Make, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"metrics\.port: 127\.0\.0\.1:{port} can't be opened"):
            async with Controller(make_config(f"metrics.port={port}"), recipes=scripted()):
                pass
        assert not (tmp_path / "runs").exists()
        async with AsyncExitStack() as stack:  # taken between the look and the opening
            with pytest.raises(ConfigError, match=r"metrics\.port: .*can't be opened by now: .*in use"):
                await Exporter("127.0.0.1", port, lambda: []).start(stack)


def test_an_event_can_be_read_at_once(tmp_path: Path) -> None:
    """A run may end in any way, and be looked at before it does."""
    board = TensorBoard(tmp_path)
    try:
        score = Evaluation(
            score=0.5, pass_at={1: 0.25}, n=4, samples=1, unscored=0, truncated_share=0.0, response_len_mean=3.0,
            tokens=12, verdicts={}, seconds=1.0, version=7, server="0", time_s=2.0,
        )  # fmt: skip
        board.evaluation(score)
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        assert [(event.step, event.value) for event in events.Scalars("eval_score")] == [(7, 0.5)]
        assert [(event.step, event.value) for event in events.Scalars("eval_pass_at/1")] == [(7, 0.25)]
    finally:
        board.close()


# --------------------------------------------------------------------------------------------------------- a whole run


@pytest.mark.slow
async def test_a_run_is_watched(make_config: Make, caplog: pytest.LogCaptureFixture) -> None:
    """By Prometheus in the middle, by TensorBoard afterwards; both see what metrics.jsonl says."""
    caplog.set_level(logging.INFO, "areal_async")
    config = make_config(
        "train.steps=4", "eval.every_steps=2", "eval.samples=2", "eval.limit=8", "metrics.port=0",
        "metrics.tensorboard=true",
    )  # fmt: skip
    scrapes: list[Samples] = []
    async with Controller(config, recipes=scripted(token_s=0.0005, step_s=0.05)) as run:
        async with aiohttp.ClientSession() as session:
            url = await address(run)
            scrapes.append(samples(await scrape(session, url)))  # before the first step
            async for row in run.steps():
                before = run._parts._core.view()
                text = await scrape(session, url)
                scrapes.append(samples(text))
                if row.step == 2:
                    said_of_step(scrapes[-1], row, before, run._parts._core.view())
        result = run.result()
    assert f"metrics: {url}" in caplog.messages
    parsed(text)
    counters_never_fall(scrapes)
    in_tensorboard(result)
    with pytest.raises(aiohttp.ClientConnectionError):
        async with aiohttp.ClientSession() as session:
            await scrape(session, url)


async def address(run: Controller) -> str:
    await until(lambda: run.metrics_url)
    return run.metrics_url


async def scrape(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return await answer.text()


def said_of_step(seen: Samples, row: StepRow, before: View, after: View) -> None:
    """before, after: the core's state around the look."""

    def value(name: str, **labels: str) -> float:
        return seen[(f"areal_async_{name}", tuple(sorted(labels.items())))]

    assert value("info", run="scripted", version="0.1.0") == 1
    assert 3 <= before.version <= value("version") <= after.version <= 4
    assert value("steps_planned") == 4
    assert value("lag_max_steps") <= 2
    states = {state: value("trainer_state", state=state) for state in ("starting", "idle", "training", "publishing")}
    assert sum(states.values()) == 1
    assert value("server_state", server="0", state="serving") + value("server_state", server="0", state="updating") == 1
    (old,), (new,) = before.servers, after.servers
    assert 0 <= old.version <= value("server_version", server="0") <= new.version <= 4
    assert value("groups", state="trained") >= 12
    assert value("samples", state="trained") == 2 * value("groups", state="trained")
    assert value("trained_tokens_total") > 0
    assert value("generated_tokens_total") >= value("trained_tokens_total")
    assert sum(number for (name, _), number in seen.items() if name == "areal_async_checks_total") >= 24
    assert 0 <= value("last_event_age_seconds") <= value("run_seconds") - row.time_s
    assert 0 <= value("server_idle_ratio", server="0") <= 1
    assert value("lost_ratio", quarter="4") == 0


def counters_never_fall(scrapes: list[Samples]) -> None:
    names = {key for seen in scrapes for key in seen if key[0].endswith("_total")}
    assert len(names) >= 9
    for key in names:
        values = [seen.get(key, 0.0) for seen in scrapes]
        assert values == sorted(values), key


def in_tensorboard(result: RunResult) -> None:
    events = EventAccumulator(str(result.folder / "tensorboard"))
    events.Reload()
    for name in ("reward_mean", "lag_mean", "trainer_wait_s", "tokens_trained", "loss"):
        points = [(event.step, event.value) for event in events.Scalars(name)]
        assert points == [(row.step, pytest.approx(getattr(row, name), rel=1e-6)) for row in result.rows]
    tags = set(events.Tags()["scalars"])
    assert {"ledger/trained", "rollout_idle_by_server/0", "lost_by_length/4", "eval_score", "eval_pass_at/2"} <= tags
    assert not {"skipped", "waited_for", "eval_version"} & tags
    scored = [(event.step, event.value) for event in events.Scalars("eval_score")]
    assert scored == [(one.version, one.score) for one in result.evaluations]
    assert scored[-1][0] == 4
