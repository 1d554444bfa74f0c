"""The server of the page: what it answers, and what one broken run does to the others."""

import asyncio
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest

from areal_async.config import Config
from areal_async.controller import Controller, status
from areal_async.errors import LogError
from areal_async.log import format as fmt
from areal_async.log.reader import read_records
from areal_async.log.writer import RunLog
from areal_async.messages import Fail, Scored, Woke
from areal_async.testing.recipes import scripted
from areal_async.view import api, opened, run
from areal_async.view.index import Index

from ..waiting import Straggler, until
from .asking import asking
from .folders import RECORDED, STEPS, row, write_rows, write_run, write_status

ROUTES = {
    "overview": api.Overview, "lags": api.Lags, "timeline?from=0&to=9&width=300": api.Timeline,
    "samples": api.SamplePage, "peers": api.Peers,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ answers


async def test_every_address_answers_as_the_contract_says(runs: Path) -> None:
    async with asking(runs) as asked:
        await asked.read("first")
        for path, kind in ROUTES.items():
            answer = await asked.get(f"/api/runs/first/{path}")
            assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store"), path
            msgspec.json.decode(await answer.read(), type=kind)
        listed = msgspec.json.decode(await (await asked.get("/api/runs")).read(), type=api.Runs)
        assert ([each.key for each in listed.runs], listed.single) == (["first"], False)
        page = msgspec.json.decode(await (await asked.get("/api/runs/first/samples")).read(), type=api.SamplePage)
        answer = await asked.get(f"/api/runs/first/samples/{page.rows[0].id}")
        full = msgspec.json.decode(await answer.read(), type=api.SampleFull)
        assert full.record.id == page.rows[0].id
        assert len(msgspec.json.decode(await (await asked.get("/api/figures")).read(), type=list[api.Figure])) > 9
        answer = await asked.get("/api/runs/first/config")
        assert (answer.content_type, await answer.text()) == ("text/plain", "name: first\ntrain: {steps: 9}\n")


async def test_the_overview_is_what_lies_in_the_folder(runs: Path) -> None:
    write_status(runs / "first", ended="", host="node7")
    async with asking(runs) as asked:
        seen = await asked.read("first")
        assert [json.loads(bytes(each))["step"] for each in seen.rows] == list(range(STEPS))
        assert (seen.next, seen.branch, seen.in_flight, seen.ready) == (STEPS, 1, 5, 1)
        assert (seen.waits, seen.phase) == (["step 2 waits for group 0"], "saves the model")
        assert seen.balance == {"admitted": 6, "trained": 4, "outstanding": 2}
        assert (seen.run.state, seen.run.version, seen.run.steps, seen.run.reward) == ("running", 3, 9, 0.25)
        assert any(each.what == "rolled_back" for each in seen.troubles)
        assert seen.problems == []
        with (runs / "first" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row(3, reward_mean=float("nan"))).replace("NaN", "null") + '\n{"step": 4')
        more = await asked.overview("first", since=STEPS)
        assert ([json.loads(bytes(each))["step"] for each in more.rows], more.next) == ([3], 4)
        peers = msgspec.json.decode(await (await asked.get("/api/runs/first/peers")).read(), type=api.Peers)
        ended = [each.message for each in read_records(RECORDED) if isinstance(each.message, Scored)]
        assert peers.verdicts == dict(Counter(each.verdict for each in ended))


async def test_what_is_there_of_half_a_run_is_shown(runs: Path) -> None:
    for name in ("status.json", "config.yaml", "log/decisions.log"):
        (runs / "first" / name).unlink()
    async with asking(runs) as asked:
        seen = await asked.read("first")
        assert (len(seen.rows), seen.balance, seen.run.name) == (STEPS, {"admitted": 2}, "first")
        assert "decisions.log: can't be read: No such file or directory" in seen.reading.problem
        assert "first/config.yaml: can't be read: No such file" in await asked.error("/api/runs/first/config", 404)
        assert (await asked.get("/api/runs/first/samples")).status == 200
        assert (await asked.get("/api/runs/first/peers")).status == 200


async def test_evaluations_are_those_of_their_file_or_of_the_rows(runs: Path) -> None:
    point = {"version": 4, "time_s": 9.5, "score": 0.5, "pass_at": {"1": 0.5}, "n": 3}
    write_rows(runs / "first", row(0, eval_version=1, eval_score=0.25))
    async with asking(runs) as asked:
        assert [(each.version, each.score) for each in (await asked.overview("first")).evaluations] == [(1, 0.25)]
        (runs / "first" / "eval").mkdir()
        path = runs / "first" / "eval" / "results.jsonl"
        path.write_text(json.dumps(point) + "\n{}\n" + '{"version": 5')
        seen = await asked.overview("first")
        assert [(each.version, each.score, each.pass_at) for each in seen.evaluations] == [(4, 0.5, {1: 0.5})]
        (problem,) = seen.problems
        assert problem.startswith(f"{path}:2: is no evaluation of this release")


async def test_the_end_is_in_the_log_where_nobody_told_it(runs: Path, make_config: Callable[..., Config]) -> None:
    write_status(runs / "first", ended="")
    shutil.rmtree(runs / "first" / "log")
    log = RunLog(runs / "first" / "log", 1 << 20)
    for record in (make_config().rules, Woke(at=7.0), Fail(why="too many failed")):
        log.append(record)
    log.flush()
    log.close()
    async with asking(runs) as asked:
        seen = await asked.read("first")
        assert (seen.run.state, seen.run.end) == ("died", "the run fails: too many failed")


async def test_a_story_is_told(runs: Path) -> None:
    async with asking(runs) as asked:
        assert "id: is missing" in await asked.error("/api/runs/first/story", 400)
        assert "'step x' is no step" in await asked.error("/api/runs/first/story?id=step%20x", 400)


@pytest.mark.slow  # a child reads the log
async def test_a_story_is_told_by_a_child(runs: Path) -> None:
    async with asking(runs) as asked:
        answer = await asked.get("/api/runs/first/story?id=step%200")
        story = msgspec.json.decode(await answer.read(), type=api.Story)
        assert (story.thing, bool(story.lines)) == ("step 0", True)
        assert "there is no sample 999.9" in await asked.error("/api/runs/first/story?id=999.9", 404)


async def test_a_log_that_grows_is_read_on(runs: Path) -> None:
    log = runs / "first" / "log" / "decisions.log"
    data = log.read_bytes()
    log.write_bytes(data[: len(data) // 2])
    async with asking(runs) as asked:
        seen = await asked.read("first")
        assert "torn" in seen.reading.problem or seen.reading.nbytes < len(data)
        log.write_bytes(data)
        await until(lambda: asked.runs.run("first")._reading().nbytes == len(data))
        seen = await asked.overview("first")
        assert seen.reading.problem == ""


async def test_a_run_that_is_over_is_read_when_all_of_its_log_is(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page asks no more then, and its end was written since the last look at the log."""
    monkeypatch.setattr(run, "EVERY_S", 3600.0)
    log = runs / "first" / "log" / "decisions.log"
    data = log.read_bytes()
    log.write_bytes(data[: len(data) // 2])
    async with asking(runs) as asked:
        assert (await asked.read("first")).run.state == "ended"
        log.write_bytes(data)
        seen = await asked.overview("first")
        assert (seen.run.state, seen.reading.problem, seen.reading.done) == ("ended", "", False)


@pytest.mark.slow
async def test_a_run_is_watched_from_its_start_to_its_end(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(status, "EVERY_S", 0.1)
    straggler = Straggler()  # until it was seen that the run goes on, it can't end
    states: list[str] = []
    rows: list[bytes] = []
    folders: list[Path] = []

    async def trains() -> None:
        config = make_config("train.steps=6")
        async with Controller(config, workflow=straggler, recipes=scripted()) as controller:
            folders.append(controller.folder)
            await controller.run()

    (tmp_path / "runs").mkdir()
    write_run(tmp_path / "runs" / "before")
    async with asking(tmp_path / "runs") as asked, asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(trains())
        await until(lambda: folders)
        key = folders[0].name
        while states[-1:] != ["ended"]:
            seen = await asked.overview(key, since=len(rows))
            rows += [bytes(each) for each in seen.rows]
            states += [seen.run.state] * (seen.run.state not in states[-1:])
            if "running" in states:
                straggler.go.set()
            assert (seen.problems, seen.reading.problem) == ([], "")
            listed = msgspec.json.decode(await (await asked.get("/api/runs")).read(), type=api.Runs)
            assert {each.key for each in listed.runs} == {"before", key}
            await asyncio.sleep(0.01)
        assert states == ["starting", "running", "ended"]
        assert [json.loads(each)["step"] for each in rows] == list(range(6))
        assert b"".join(line + b"\n" for line in rows) == (folders[0] / "metrics.jsonl").read_bytes()
        await until(lambda: asked.runs.run(key)._reading().samples >= seen.balance["samples_trained"])


# ---------------------------------------------------------------------------------------------------------- bad input


async def test_what_there_is_not_is_named(runs: Path) -> None:
    async with asking(runs) as asked:
        await asked.read("first")
        assert f"'second': there is no such run in {runs}" == await asked.error("/api/runs/second/overview", 404)
        for strange in ("..", "../first", "/etc", "first/../first", "", ".", "\0", "first/log"):
            assert await asked.error(f"/api/runs/{quote(strange, safe='')}/config", 404)
        assert "sample '999.0': there is none" in await asked.error("/api/runs/first/samples/999.0", 404)
        assert "sample 'trainer': there is none" in await asked.error("/api/runs/first/samples/trainer", 404)
        assert "'group x' is no group" in await asked.error("/api/runs/first/samples/group%20x", 400)
        assert "there is no such address" in await asked.error("/api/nothing", 404)
        for strange in ("server.py", "nothing.js", "..%2fstatic%2fapp.js", "%2fetc%2fpasswd", "", "index.html%00"):
            assert await asked.error(f"/static/{strange}", 404)


WRONG = [
    ("overview?since=x", "since: 'x' is not a whole number"),
    ("overview?since=-1", "since: -1 is too small; from 0 on"),
    ("overview?sinse=1", "sinse: no such field; there is since"),
    ("lags?from=1.5", "from: '1.5' is not a whole number"),
    ("lags?to=99999999999999999999", "to: 99999999999999999999 is too large"),
    ("timeline?from=nan", "from: 'nan' is not a number"),
    ("timeline?from=5&to=4", "to: 4 is not after from (5)"),
    ("timeline?width=0", "width: 0 is too small; from 1 on"),
    ("samples?stpe=3", "stpe: no such field; there is step"),
    ("samples?step=three", "step: 'three' is not a whole number"),
    ("samples?reward_min=much", "reward_min: 'much' is not a number"),
    ("samples?reward_min=nan", "reward_min: 'nan' is not a number"),
    ("samples?truncated=perhaps", "truncated: 'perhaps' is not true or false"),
    ("samples?limit=0", "limit: 0 is not in 1 … 500"),
    ("samples?offset=-1", "offset: -1 is below 0"),
    ("samples?sort=rewrad", "sort: 'rewrad' is no column; there is reward"),
    ("samples?group=9223372036854775808", "group: "),
]


async def test_a_wrong_value_is_named_with_its_field(runs: Path) -> None:
    async with asking(runs) as asked:
        for question, words in WRONG:
            assert (await asked.error(f"/api/runs/first/{question}", 400)).startswith(words), question


async def test_filters_reach_the_search(runs: Path) -> None:
    async with asking(runs) as asked:
        await asked.read("first")
        answer = await asked.get("/api/runs/first/samples?outcome=trained&sort=length&descending=false&limit=3&text=")
        page = msgspec.json.decode(await answer.read(), type=api.SamplePage)
        assert len(page.rows) == 3 < page.total
        assert {each.outcome for each in page.rows} == {"trained"}
        assert [each.length for each in page.rows] == sorted(each.length for each in page.rows)


def newer(folder: Path) -> None:
    log = folder / "log" / "decisions.log"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fmt, "VERSION", fmt.VERSION + 1)
        header = fmt.file_header("decisions")
    log.write_bytes(header + log.read_bytes()[len(header) :])


def damaged(folder: Path) -> None:
    log = folder / "log" / "decisions.log"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 255
    log.write_bytes(data)


def torn(folder: Path) -> None:
    log = folder / "log" / "decisions.log"
    log.write_bytes(log.read_bytes()[:-3])
    os.utime(log, (1, 1))  # nobody writes it any more


@pytest.mark.parametrize(("harm", "words"), [(newer, "written in format 2"), (damaged, "checksum"), (torn, "torn")])
async def test_a_log_that_cannot_be_read_is_one_line_and_the_rest_is_shown(
    runs: Path, harm: Callable[[Path], None], words: str
) -> None:
    harm(write_run(runs / "second"))
    async with asking(runs) as asked:
        seen = await asked.read("second")
        assert words in seen.reading.problem
        assert "decisions.log" in seen.reading.problem
        assert len(seen.rows) == STEPS
        assert (await asked.get("/api/runs/second/samples")).status == 200
        assert (await asked.read("first")).reading.problem == ""


@pytest.mark.parametrize("error", [LogError("the log is odd"), OSError(5, "the disk"), KeyError("a bug")])
async def test_a_run_whose_reading_fails_says_so_and_the_others_go_on(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    write_run(runs / "second")
    read_some = Index.read_some

    def fails(index: Index, seconds: float) -> bool:
        if "second" in str(index._log_folder):
            raise error
        return read_some(index, seconds)

    monkeypatch.setattr(Index, "read_some", fails)
    async with asking(runs) as asked:
        seen = await asked.read("second")
        assert seen.reading.problem.startswith(f"{runs}/second/log: can't be read on: ")
        assert str(error) in seen.reading.problem
        assert len(seen.rows) == STEPS
        assert (await asked.read("first")).reading.problem == ""
    assert ("can't be read on" in caplog.text) == isinstance(error, KeyError)


async def test_an_error_of_ours_is_told_where_the_server_was_started(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run.Run, "config", lambda self: 1 / 0)
    async with asking(runs) as asked:
        assert "an error of areal-async; its terminal has it" in await asked.error("/api/runs/first/config", 500)
        assert "ZeroDivisionError" in caplog.text
        assert (await asked.get("/api/runs/first/overview")).status == 200


async def test_a_broken_status_is_a_problem_of_its_run(runs: Path) -> None:
    write_run(runs / "second")
    (runs / "second" / "status.json").write_text('{"time": 1}')
    async with asking(runs) as asked:
        seen = await asked.overview("second")
        (problem,) = seen.problems
        assert "second/status.json: was not written by this release of areal-async" in problem
        assert (seen.run.state, seen.run.name, seen.run.steps, len(seen.rows)) == ("unreadable", "first", 9, STEPS)
        assert "status.json" in (await (await asked.get("/api/runs/second/peers")).json())["problem"]
        assert (await asked.overview("first")).run.state == "ended"


@pytest.mark.slow
@pytest.mark.parametrize("single", [False, True])
async def test_a_folder_that_is_removed_while_somebody_looks(runs: Path, single: bool) -> None:
    async with asking(runs / "first" if single else runs) as asked:
        await asked.read("first")
        shutil.rmtree(runs / "first")
        assert "run 'first' is gone: its folder was removed" in await asked.error("/api/runs/first/overview", 404)
        assert await asked.error("/api/runs/first/samples", 404)
        assert asked.runs._runs == {}
        listed = msgspec.json.decode(await (await asked.get("/api/runs")).read(), type=api.Runs)
        assert [(each.state, each.problem) for each in listed.runs] == (
            [("unreadable", f"{runs}/first: is gone")] if single else []
        )
        write_run(runs / "first")
        assert (await asked.read("first")).reading.samples > 0


async def test_few_runs_are_kept_and_the_longest_unused_is_dropped(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "MOST", 2)
    for name in ("b", "c"):
        write_run(runs / name)
    async with asking(runs) as asked:
        for key in ("first", "b", "first"):
            await asked.read(key)
        dropped, before = asked.runs._runs["b"]
        await asked.read("c")
        assert (before.cancelled(), dropped._failed) == (True, "")
        tasks = {task.get_name() for task in asyncio.all_tasks()}
        assert {name for name in tasks if name.startswith("reads ")} == {
            f"reads {runs}/{key}" for key in ("first", "c")
        }
        assert (await asked.read("b")).reading.samples > 0
        assert list(asked.runs._runs) == ["c", "b"]


async def test_nothing_is_read_of_a_run_that_nobody_looks_at(runs: Path) -> None:
    async with asking(runs) as asked:
        await asked.get("/api/runs")
        await asked.get("/")
        assert asked.runs._runs == {}


async def test_two_look_at_the_same_run(runs: Path) -> None:
    async with asking(runs) as one, asking(runs / "first") as other:
        assert (await one.read("first")).reading == (await other.read("first")).reading
