"""Whom the server answers, with which headers, and the page's own files."""

import asyncio
import gzip
from pathlib import Path

import pytest

from areal_async.errors import ConfigError
from areal_async.view import files
from areal_async.view.server import HEADERS
from areal_async.view.token import Access, access

from .asking import asking

TOKEN = "a-long-enough-token"

# -------------------------------------------------------------------------------------------------------------- files


async def test_files_are_packed_and_kept_by_their_content(runs: Path, tmp_path: Path) -> None:
    async with asking(runs) as asked:
        for name in ("", "static/app.js", "static/style.css"):
            plain = await asked.get(f"/{name}", **{"Accept-Encoding": "identity"})
            assert (plain.status, plain.headers.get("Content-Encoding")) == (200, None)
            assert plain.headers["Cache-Control"] == "no-cache"
            again = await asked.get(f"/{name}", **{"If-None-Match": plain.headers["ETag"]})
            assert (again.status, await again.read()) == (304, b"")
            asked.client.session._auto_decompress = False
            packed = await asked.get(f"/{name}", **{"Accept-Encoding": "gzip"})
            asked.client.session._auto_decompress = True
            assert packed.headers["Content-Encoding"] == "gzip"
            body = await packed.read()
            assert gzip.decompress(body) == await plain.read()
            assert len(body) < len(gzip.decompress(body))
        head = await asked.client.head("/static/app.js")
        assert (head.status, await head.read()) == (200, b"")


async def test_a_file_is_packed_when_it_is_new_and_not_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "static").mkdir()
    path = tmp_path / "static" / "app.js"
    path.write_text("one")
    packed: list[bytes] = []
    pack = files.pack

    async def counted(body: bytes, level: int) -> bytes:
        packed.append(body)
        return await pack(body, level)

    monkeypatch.setattr(files, "pack", counted)
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    kept = files.Files()
    for text in ("one", "one", "two", "two"):
        path.write_text(text)
        file = kept.file("app.js")
        assert file is not None
        assert gzip.decompress(await file.packed()).decode() == text
    assert packed == [b"one", b"two"]


async def test_plotly_comes_from_its_package_and_is_read_once(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plotly.min.js"
    path.write_bytes(b"var Plotly;" * 99_999)
    monkeypatch.setattr(files, "plotly_path", lambda: path)
    async with asking(runs) as asked:
        answers = await asyncio.gather(*(asked.get("/static/plotly.min.js") for _ in range(3)))
        for answer in answers:
            assert (answer.content_type, await answer.read()) == ("text/javascript", path.read_bytes())
        path.unlink()
        assert (await asked.get("/static/plotly.min.js")).status == 200


async def test_without_plotly_the_rest_is_shown(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    async with asking(runs) as asked:
        assert "pip install plotly" in await asked.error("/static/plotly.min.js", 500)
        assert (await asked.get("/")).status == 200


def test_plotly_is_there() -> None:
    assert files.plotly_path().stat().st_size > 1 << 20


# --------------------------------------------------------------------------------------------------------- who may ask


async def test_it_only_shows(runs: Path) -> None:
    async with asking(runs) as asked:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            answer = await asked.client.request(method, "/api/runs")
            assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
            assert "this server only shows" in (await answer.json())["error"]


async def test_every_answer_has_the_security_headers(runs: Path) -> None:
    async with asking(runs) as asked:
        for path in ("/", "/static/app.js", "/api/runs", "/api/runs/first/overview", "/nothing", "/static/nothing"):
            assert HEADERS.items() <= dict((await asked.get(path)).headers).items()
        policy = (await asked.get("/")).headers["Content-Security-Policy"]
        assert "default-src 'self';" in policy
        assert "script-src" not in policy  # so scripts come from here alone, and none stands in the page
        assert "frame-ancestors 'none'" in policy


async def test_a_name_that_points_here_is_not_enough(runs: Path) -> None:
    async with asking(runs) as asked:
        for host in ("evil.example", "evil.example:8420", "127.0.0.1.evil.example", "", "[::2]"):
            for path in ("/", "/api/runs", "/static/app.js"):
                assert "open it as localhost" in await asked.error(path, 403, Host=host)
        for host in ("localhost", "localhost:9", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8420"):
            assert (await asked.get("/api/runs", Host=host)).status == 200, host


def test_the_host_that_was_asked_for_is_known() -> None:
    assert Access("127.0.0.7", "").knows_host("127.0.0.7:80")
    assert not Access("127.0.0.7", "").knows_host("127.0.0.8:80")
    assert Access("0.0.0.0", TOKEN).knows_host("any.name:80")  # the token is what protects


async def test_nothing_is_told_without_the_token(runs: Path) -> None:
    async with asking(runs, Access("127.0.0.1", TOKEN)) as asked:
        for path in ("/", "/static/app.js", "/static/plotly.min.js", "/api/runs", "/api/runs/first/config", "/nothing"):
            assert "…/?token=…" in await asked.error(path, 401)
            assert await asked.error(path, 401, Authorization=f"Bearer {TOKEN}x")
            assert await asked.error(path, 401, Authorization=f"Basic {TOKEN}")
            assert await asked.error(path, 401, Cookie=f"areal_async={TOKEN}")
        assert "the token in the address is wrong" in await asked.error("/?token=wrong", 401)
        assert await asked.error("/?token=", 401)
        assert await asked.error(f"/api/runs?token={TOKEN}", 401)  # addresses of data are sent on
        assert (await asked.get("/api/runs", Authorization=f"Bearer {TOKEN}")).status == 200
        assert (await asked.get("/api/runs", Authorization=f"bearer {TOKEN}")).status == 200


async def test_the_token_leaves_the_address_and_becomes_a_cookie(runs: Path) -> None:
    rights = Access("127.0.0.1", TOKEN)
    async with asking(runs, rights) as asked:
        answer = await asked.get(f"/?token={TOKEN}")
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        cookie = answer.headers["Set-Cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "path=/" in cookie
        assert HEADERS.items() <= dict(answer.headers).items()
        assert (await asked.get("/", Cookie=f"{rights.cookie}={TOKEN}")).status == 200
    assert Access("127.0.0.1", TOKEN + "2").cookie != rights.cookie


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bool] = []
    monkeypatch.setattr("hmac.compare_digest", lambda one, other: compared.append(one == other) or True)
    assert Access("0.0.0.0", TOKEN).knows_token("ä")
    assert Access("0.0.0.0", TOKEN).knows_token(None)
    assert len(compared) == 2


def test_others_are_let_in_with_a_token_alone() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.7", "node7"):
        with pytest.raises(ConfigError, match=f"--host {host}: other machines could read the run; add `--token auto`"):
            access(host, None, {})
        assert access(host, None, {"AREAL_ASYNC_TOKEN": TOKEN}).token == TOKEN
        assert len(access(host, "auto", {}).token) >= 32
        assert access(host, "auto", {}).token != access(host, "auto", {}).token
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert access(host, None, {}).token == ""
        assert access(host, TOKEN, {}).token == TOKEN


@pytest.mark.parametrize(
    ("token", "words"),
    [("short", "5 characters can be guessed"), ("with a space in it", "letters, digits"), ("", "is empty")],
)
def test_a_token_that_is_none(token: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        access("127.0.0.1", token, {})
