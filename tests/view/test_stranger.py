"""Folders and requests that nobody had in mind: each is one line, and everything else is shown."""

import asyncio
import contextlib
import gc
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from aiohttp import web

from areal_async.errors import ConfigError
from areal_async.view import api, files, server
from areal_async.view.rows import Rows
from areal_async.view.runs import RunFolders
from areal_async.view.serving import listening
from areal_async.view.story import Stories
from areal_async.view.token import Access

from ..waiting import until
from .asking import Asked, asking
from .folders import LOGS, STEPS, row, write_rows, write_run

NOBODY = 65534
BAD_NAME = "bad\udcff"


async def listed(asked: Asked) -> dict[str, api.RunRow]:
    answer = await asked.get("/api/runs")
    assert answer.status == 200, await answer.text()
    found = msgspec.json.decode(await answer.read(), type=api.Runs)
    return {each.key: each for each in found.runs}


@contextlib.contextmanager
def without_power() -> Iterator[None]:
    """Root may enter everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Others than root may look into it, which those of pytest don't let them."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


# ------------------------------------------------------------------------------------------------------------ folders


async def test_links_in_a_circle_hide_no_run(runs: Path) -> None:
    (runs / "a").symlink_to("b")
    (runs / "b").symlink_to("a")
    (runs / "gone").symlink_to("nowhere")
    async with asking(runs) as asked:
        assert list(await listed(asked)) == ["first"]
        assert "there is no such run" in await asked.error("/api/runs/a/overview", 404)
    with pytest.raises(ConfigError, match="no such folder"):
        RunFolders(runs / "a")


async def test_a_name_that_is_no_text_is_a_line(runs: Path) -> None:
    shutil.copytree(runs / "first", runs / BAD_NAME)
    async with asking(runs) as asked:
        found = await listed(asked)
        assert sorted(found) == ["bad\ufffd", "first"]
        assert found["bad\ufffd"].state == "unreadable"
        assert "its name isn't UTF-8" in found["bad\ufffd"].problem
        assert "there is no such run" in await asked.error("/api/runs/bad%EF%BF%BD/overview", 404)
    with pytest.raises(ConfigError, match="its name isn't UTF-8") as raised:
        RunFolders(runs / BAD_NAME)
    str(raised.value).encode()
    (runs / "link").symlink_to(BAD_NAME)
    async with asking(runs / "link") as asked:
        assert list(await listed(asked)) == ["bad\ufffd"]
        assert len((await asked.overview("bad\ufffd")).rows) == STEPS


async def test_a_folder_that_nobody_may_enter_is_a_line(open_folder: Path, at_once: None) -> None:
    (open_folder / "runs").mkdir()
    write_run(open_folder / "runs" / "first")
    closed = write_run(open_folder / "runs" / "closed")
    async with asking(open_folder / "runs") as asked:
        assert (await listed(asked))["closed"].state == "ended"
        closed.chmod(0)
        try:
            with without_power():
                found = await listed(asked)
                assert (found["closed"].state, found["first"].state) == ("unreadable", "ended")
                assert "closed/status.json: can't be read: Permission denied" in found["closed"].problem
                await asked.error("/api/runs/closed/overview", 404)
                with pytest.raises(ConfigError, match="closed: can't be read: Permission denied"):
                    RunFolders(closed)
        finally:
            closed.chmod(0o755)
        assert (await asked.read("closed")).reading.problem == ""


async def test_a_configuration_can_not_grow_when_it_is_read(runs: Path) -> None:
    lists = "".join(f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]\n" for number in range(1, 9))
    for name, text in {"many": f"a0: &a0 [x]\n{lists}name: *a8\ntrain: {{steps: 4}}\n", "deep": "[" * 5000}.items():
        (runs / name / "log").mkdir(parents=True)
        (runs / name / "config.yaml").write_text(text)
    async with asking(runs) as asked:
        found = await listed(asked)
        assert {key: each.name for key, each in found.items()} == {"many": "many", "deep": "deep", "first": "first"}
        assert found["many"].steps == 4


async def test_another_folder_of_the_same_name_is_another_run(runs: Path) -> None:
    async with asking(runs) as asked:
        before = await asked.read("first")
        (runs / "first").rename(runs / "old")
        write_run(runs / "first", LOGS / "drop-requeue-gone-back")
        write_rows(runs / "first", *(row(step, time_s=0.5 * step) for step in range(STEPS + 4)))
        after = await asked.read("first")
        assert (before.file, len(before.rows), len(after.rows)) != (after.file, STEPS, STEPS)
        assert len(after.rows) == STEPS + 4
        assert before.reading.events != after.reading.events
        assert (await asked.read("old")).reading == before.reading


# --------------------------------------------------------------------------------------------------------------- rows


def test_a_longer_file_in_the_place_of_another_is_read_from_its_beginning(tmp_path: Path) -> None:
    found = Rows(tmp_path)
    assert found.mark == ""
    write_rows(tmp_path, row(0), row(1))
    found.read_some(1.0)
    first = found.mark
    write_rows(tmp_path, row(0), row(1), row(2))
    found.read_some(1.0)
    assert (found.mark, len(found)) == (first, 3)
    write_rows(tmp_path, *(row(step, time_s=1.5 + step) for step in range(9)))
    found.read_some(1.0)
    assert len(found) == 9
    assert found.mark not in ("", first)
    assert [json.loads(bytes(each))["step"] for each in found.since(0)[0]] == list(range(9))


def test_a_file_that_becomes_shorter_between_two_looks_gives_nothing(tmp_path: Path) -> None:
    write_rows(tmp_path, row(0), row(1))
    found = Rows(tmp_path)
    found.read_some(1.0)
    write_rows(tmp_path, row(0))
    assert found.since(0) == ([], 0)


def test_a_line_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "waited_for": "\xff"}\n{"step": 1}\n')
    found = Rows(tmp_path)
    found.read_some(1.0)
    assert [bytes(each) for each in found.since(0)[0]] == [b'{"step": 1}']
    assert "metrics.jsonl:1: is no row" in found.problems[0]


async def test_numbers_that_json_has_not_are_a_line(runs: Path) -> None:
    with (runs / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": NaN}\n{"step": 4, "loss": Infinity}\n{"step": 5, "loss": 1e999}\n{"step": 6')
    async with asking(runs) as asked:
        seen = await asked.overview("first")
        assert [json.loads(bytes(each))["step"] for each in seen.rows] == [0, 1, 2, 5]
        assert ["4: is no row" in seen.problems[0], "5: is no row" in seen.problems[1]] == [True, True]


# ----------------------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize("text", ["1" * 5000, f"step {'9' * 5000}", "1.1\0", "a\nb", "1." + "2" * 200])
async def test_an_id_that_can_be_none(runs: Path, text: str) -> None:
    async with asking(runs) as asked:
        said = []
        answer = await asked.client.get("/api/runs/first/story", params={"id": text})
        said.append((answer.status, (await answer.json())["error"]))
        answer = await asked.get(f"/api/runs/first/samples/{quote(text)}")
        said.append((answer.status, (await answer.json())["error"]))
        for status, error in said:
            assert (status, "can be none" in error, len(error) < 200) == (400, True, True)


@pytest.mark.slow
async def test_an_answer_that_was_taken_is_not_kept(runs: Path) -> None:
    async with asking(runs) as asked:
        for _ in range(3):
            answer = await asked.get("/api/runs/first/overview")
            assert len(await answer.read()) > 1000
        # isinstance would ask proxies of other modules, which import what they stand for
        answers = [one for one in gc.get_objects() if issubclass(type(one), web.Response)]
        assert [one for one in answers if one.body] == []


@pytest.mark.slow
async def test_who_takes_nothing_is_hung_up_on(runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "plotly.min.js"
    path.write_bytes(b"x" * (32 << 20))  # more than the kernel keeps of it
    monkeypatch.setattr(files, "plotly_path", lambda: path)
    monkeypatch.setattr(server, "TAKEN_WITHIN_S", 0.05)
    monkeypatch.setattr(server, "AT_ONCE", 1)
    async with asking(runs) as asked:
        with socket.create_connection(("127.0.0.1", asked.client.port or 0)) as slow:
            slow.sendall(b"GET /static/plotly.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
            slow.setblocking(False)
            await asyncio.sleep(0.01)
            async with asyncio.timeout(5):
                assert (await asked.get("/static/app.js")).status == 200  # the place is free again
                assert (await asked.get("/api/runs/first/overview")).status == 200


async def test_a_story_that_nobody_waits_for_is_not_told(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    text = f"import os, time; open({str(begun)!r}, 'w').write(str(os.getpid()) + os.linesep); time.sleep(99)"
    program = [sys.executable, "-S", "-c", text]
    monkeypatch.setattr(Stories.__init__, "__defaults__", (program, 60.0))
    async with listening(RunFolders(runs), Access("127.0.0.1", ""), 0) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /api/runs/first/story?id=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: begun.exists() and begun.read_text().endswith("\n"))
        writer.close()
        await until(lambda: not Path(f"/proc/{begun.read_text().strip()}").exists())


async def test_files_that_can_not_be_read_are_lines(runs: Path) -> None:
    for name in ("metrics.jsonl", "eval/results.jsonl", "status.json", "checks.jsonl", "config.yaml"):
        path = runs / "first" / name
        path.unlink(missing_ok=True)
        path.mkdir(parents=True)
    async with asking(runs) as asked:
        seen = await asked.read("first")
        assert [problem.partition(": ")[0].rpartition("first/")[2] for problem in seen.problems] == [
            "status.json", "metrics.jsonl", "eval/results.jsonl",
        ]  # fmt: skip
        assert all("can't be read: Is a directory" in problem for problem in seen.problems)
        assert (seen.rows, seen.reading.problem) == ([], "")
        assert (await asked.get("/api/runs/first/samples")).status == 200
        assert "Is a directory" in await asked.error("/api/runs/first/config", 404)
