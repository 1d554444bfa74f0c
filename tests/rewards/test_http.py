"""The reward `http` against a real server that fails in every way a server can."""

import email.utils
import random
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from areal_async.errors import RewardError
from areal_async.messages import HttpOptions, RewardSpec, ScoreResult, ScoreTask
from areal_async.rewards import http
from areal_async.rewards.http import Judge, endpoint

from ..waiting import SLACK_S
from .judge import Books, serving

TaskOf = Callable[..., ScoreTask]
Encode = Callable[[str], bytes]
MANY = 100


@pytest.fixture
def books() -> Iterator[Books]:
    with serving() as books:
        yield books


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BACKOFF_S", 0.002)


def spec_of(url: str | None, *, function: str = "http", timeout_s: float = 10.0, **options: object) -> RewardSpec:
    return RewardSpec(function=function, timeout_s=timeout_s, http=HttpOptions(url=url, **options))


def results_of(spec: RewardSpec, tasks: list[ScoreTask]) -> list[ScoreResult]:
    """The results of checks that were submitted all at once, in the order of finishing."""
    with Judge(spec) as judge:
        for number, task in enumerate(tasks):
            judge.submit(number, task, b"")
        found = [judge.next_result() for _ in tasks]
    numbers, results = zip(*(result for result in found if result), strict=True)
    assert sorted(numbers) == list(range(len(tasks)))
    assert [tasks[number].sample for number in numbers] == [result.sample for result in results]
    return list(results)


@pytest.fixture
def text_of(task_of: TaskOf) -> TaskOf:
    def make(answer: str, sample: str = "0.0", **columns: object) -> ScoreTask:
        return msgspec.structs.replace(task_of(sample, answer, **columns), response="the response")

    return make


INFRASTRUCTURE = ("infrastructure", None)


@pytest.mark.parametrize(
    ("script", "expected", "asked", "why"),
    [
        ("given:0.25", ("given", 0.25), 1, "^as I see it$"),
        ("verdict:right", ("right", 1.0), 1, "^said so$"),
        ("verdict:wrong", ("wrong", 0.0), 1, "^said so$"),
        ("verdict:no_answer", ("no_answer", 0.0), 1, "^said so$"),
        ("verdict:bad_data", ("bad_data", None), 1, "^said so$"),
        ("503 given:1", ("given", 1.0), 2, ""),
        ("429 502 504 given:1", ("given", 1.0), 4, ""),
        ("503", INFRASTRUCTURE, 4, "/score: try 4 of 4: it answered 503: the server says why!"),
        (
            "later:3600 given:1",
            INFRASTRUCTURE,
            1,
            "it answered 429; to try again 3.6e[+]03 s later is after",
        ),
        ("500 given:1", INFRASTRUCTURE, 1, "/score: it answered 500: the server says why!"),
        ("404 given:1", INFRASTRUCTURE, 1, "it answered 404: the server says why!"),
        ("moved given:1", INFRASTRUCTURE, 1, "it answered 307; a redirection isn't followed"),
        ("42 given:1", INFRASTRUCTURE, 1, "its answer is no HTTP: .*42"),
        ("reset given:1", INFRASTRUCTURE, 1, "in the middle of the exchange, not repeated"),
        ("half given:1", INFRASTRUCTURE, 1, "in the middle of the exchange, not repeated"),
        pytest.param("hang given:1", INFRASTRUCTURE, 1, "no answer within 1 s$", marks=pytest.mark.slow),
        pytest.param(
            "503 hang given:1",
            INFRASTRUCTURE,
            2,
            "no answer within 1 s; before that, try 1 of 4: it answered 503",
            marks=pytest.mark.slow,
        ),
        ("endless given:1", INFRASTRUCTURE, 1, "its answer has more than 1048576 bytes"),
        ("raw:", INFRASTRUCTURE, 1, "its answer can't be read"),
        ("raw:<html>", INFRASTRUCTURE, 1, "its answer can't be read .*: <html>$"),
        ('raw:{"reward":NaN}', INFRASTRUCTURE, 1, "its answer can't be read .*NaN"),
        ('raw:{"reward":1e999}', INFRASTRUCTURE, 1, "its answer can't be read .*out of range"),
        ('raw:{"reward":"1"}', INFRASTRUCTURE, 1, "its answer can't be read .*Expected `float"),
        ('raw:{"reward":true}', INFRASTRUCTURE, 1, "its answer can't be read .*Expected `float"),
        ('raw:{"verdict":"good"}', INFRASTRUCTURE, 1, "its answer can't be read .*'good'"),
        ("raw:[1]", INFRASTRUCTURE, 1, "its answer can't be read .*Expected `object`"),
        ('raw:{"score":1}', INFRASTRUCTURE, 1, 'its answer needs `reward` or `verdict`, one of the two: {"score":1}'),
        ('raw:{"reward":1,"verdict":"right"}', INFRASTRUCTURE, 1, "one of the two"),
    ],
)
def test_what_a_judge_does_and_what_comes_of_it(
    books: Books, text_of: TaskOf, script: str, expected: tuple[str, float | None], asked: int, why: str
) -> None:
    timeout_s = 1.0 if "hang" in script else 10.0
    (found,) = results_of(spec_of(f"{books.url}?key=s3cret", timeout_s=timeout_s), [text_of(script)])
    assert (found.verdict, found.reward) == expected
    assert len(books.asked) == asked
    assert re.search(why, found.why), found.why
    assert len(found.why) < 1000
    assert "s3cret" not in found.why
    assert found.seconds < (timeout_s + SLACK_S if "hang" in script else timeout_s)
    assert books.written < 16 << 20  # what the kernel's buffers hold, not all of the endless answer


def test_what_is_sent(
    books: Books, task_of: TaskOf, encode: Encode, model_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "the-token")
    spec = msgspec.structs.replace(spec_of(books.url, token_env="JUDGE_TOKEN"), model_path=str(model_path))
    with Judge(spec) as judge:
        judge.submit(7, task_of("3.1", "given:1", level=3, tags=["a", None]), encode("6*7 is 42"))
        number, result = judge.next_result() or pytest.fail("closed")
    assert (number, result.reward, result.sample) == (7, 1.0, "3.1")
    (asked,) = books.asked
    assert asked.form == {
        "id": "3.1",
        "prompt": "6*7=",
        "response": "6*7 is 42",
        "answer": "given:1",
        "finish": "stop",
        "columns": {"level": 3, "tags": ["a", None]},
    }
    assert asked.headers["Authorization"] == "Bearer the-token"
    assert asked.headers["Content-Type"] == "application/json"
    assert asked.headers["Accept-Encoding"] == "identity"


def test_nobody_there(text_of: TaskOf) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
        (found,) = results_of(spec_of(url, retries=2), [text_of("given:1")])
        (once,) = results_of(spec_of(url, retries=0), [text_of("given:1")])
    assert (found.verdict, found.reward) == INFRASTRUCTURE
    assert re.search("try 3 of 3: no connection .*; does it run, and is reward.http.url right?", found.why)
    assert "try 1 of 1" in once.why


def test_a_connection_that_breaks_before_an_answer_is_not_asked_again(text_of: TaskOf) -> None:
    """What was written may have been read: whoever hangs up in the middle has perhaps judged."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        came: list[bytes] = []

        def hang_up() -> None:
            for _ in range(2):
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    came.append(connection.recv(1 << 16))
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        with ThreadPoolExecutor(1) as executor:
            executor.submit(hang_up)
            (found,) = results_of(spec_of(f"http://127.0.0.1:{listening.getsockname()[1]}/"), [text_of("given:1")])
            listening.shutdown(socket.SHUT_RDWR)
    assert (found.verdict, found.settled, len(came)) == ("infrastructure", True, 1)
    assert "not repeated" in found.why


def test_a_server_that_speaks_no_tls(books: Books, text_of: TaskOf) -> None:
    (found,) = results_of(spec_of(books.url.replace("http:", "https:") + "?key=s3cret"), [text_of("given:1")])
    assert found.verdict == "infrastructure"
    assert "no secure connection" in found.why
    assert "s3cret" not in found.why


def test_neither_proxies_nor_passwords_of_the_environment_are_used(
    books: Books, text_of: TaskOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    (found,) = results_of(spec_of(books.url), [text_of("given:1")])
    assert found.reward == 1.0
    assert "Authorization" not in books.asked[0].headers


@pytest.mark.slow
def test_a_judge_that_asks_for_patience_has_it(books: Books, text_of: TaskOf) -> None:
    date = int(time.time()) + 2
    at = email.utils.formatdate(date, usegmt=True).replace(" ", "_")
    tasks = [text_of("later:1 given:1", "0.0"), text_of(f"later:{at} given:1", "1.0")]
    assert [found.reward for found in results_of(spec_of(books.url), tasks)] == [1.0, 1.0]
    first, second = (asked.at for asked in books.asked if asked.form["id"] == "0.0")
    assert second - first >= 1.0
    _, second = (asked.at for asked in books.asked if asked.form["id"] == "1.0")
    assert second - time.monotonic() + time.time() >= date


@pytest.mark.parametrize("connections", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_connections_are_used_again(books: Books, text_of: TaskOf, connections: int) -> None:
    tasks = [text_of("503 given:1" if number % 10 == 0 else "given:1", f"{number}.0") for number in range(MANY)]
    found = results_of(spec_of(books.url, connections=connections), tasks)
    assert {result.reward for result in found} == {1.0}
    assert len(books.asked) == MANY + MANY // 10
    assert len({asked.port for asked in books.asked}) <= connections


def test_hanging_checks_delay_no_other(books: Books, text_of: TaskOf) -> None:
    hanging = [text_of("hang", f"{number}.0") for number in range(7)]
    quick = [text_of("given:1", f"{number}.1") for number in range(20)]
    with Judge(spec_of(books.url, connections=8, timeout_s=100)) as judge:
        for number, task in enumerate([*hanging, *quick]):
            judge.submit(number, task, b"")
        found = [judge.next_result() or pytest.fail("closed") for _ in quick]
        assert sorted(number for number, _ in found) == list(range(7, 27))
        books.release.set()
        assert {(judge.next_result() or pytest.fail("closed"))[1].reward for _ in hanging} == {1.0}


@pytest.mark.slow
def test_the_deadline_counts_from_a_place_in_the_pool(books: Books, text_of: TaskOf) -> None:
    tasks = [text_of("sleep:0.4", f"{number}.0") for number in range(7)]
    found = results_of(spec_of(books.url, connections=1, timeout_s=2.4), tasks)  # all of them take longer
    assert [result.reward for result in found] == [1.0] * 7
    assert all(0.4 <= result.seconds < 2.4 for result in found)


def test_closing_hangs_up_on_a_judge_that_is_asked(books: Books, text_of: TaskOf) -> None:
    began = time.monotonic()
    with Judge(spec_of(books.url, timeout_s=600)) as judge:
        judge.submit(0, text_of("hang"), b"")
        while not books.asked:
            time.sleep(0.005)
    assert judge.next_result() is None
    assert time.monotonic() - began < 60


def test_a_row_that_is_no_json_is_bad_data(books: Books, text_of: TaskOf) -> None:
    (found,) = results_of(spec_of(books.url), [text_of("given:1", numbers={(1, 2): 3})])
    assert (found.verdict, found.reward, books.asked) == ("bad_data", None, [])
    assert found.why.startswith("the data row can't be written as JSON: ")


@pytest.mark.parametrize(
    ("function", "script", "expected"),
    [
        ("0.5*http", "given:0.5", ("given", 0.25, "0.5 × http: given 0.5, as I see it")),
        ("http - exact", "verdict:right", ("given", 1.0, "http: right, said so")),
        ("1*http", "verdict:right", ("right", 1.0, "said so")),
        ("-2*http + exact", "404", ("infrastructure", None, "-2 × http: infrastructure, http://127")),
    ],
)
def test_as_a_summand(
    books: Books, text_of: TaskOf, function: str, script: str, expected: tuple[str, float | None, str]
) -> None:
    (found,) = results_of(spec_of(books.url, function=function), [text_of(script)])
    assert (found.verdict, found.reward, found.why[: len(expected[2])]) == expected
    assert found.settled == (found.verdict == "infrastructure")


def test_waiting_times_grow_are_spread_and_the_same_for_a_check() -> None:
    first, again, other = ([http._backoff_s(n, random.Random(seed)) for n in range(1, 9)] for seed in "aab")
    assert first == again != other
    assert all(0.5 * 0.002 * 2**n <= wait < 1.5 * 0.002 * 2**n for n, wait in enumerate(first))
    assert http._backoff_s(60, random.Random(0)) < 1.5 * http.BACKOFF_LIMIT_S


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (HttpOptions(), "reward.http.url is not set; write where answers are sent"),
        (HttpOptions(url="http:///score"), "has no host"),
        (HttpOptions(url="http://host:99999/"), "is no URL"),
        (HttpOptions(url="ftp://host/"), "has no host; write http"),
        (HttpOptions(url="http://me:secret@host/"), "has a password, which would stand in the run's files"),
        (HttpOptions(url="http://host/", token_env="NO_SUCH_TOKEN"), "there is no NO_SUCH_TOKEN in the environment"),
        (HttpOptions(url="http://host/", token_env="EMPTY_TOKEN"), "there is no EMPTY_TOKEN in the environment"),
        (HttpOptions(url="http://host/", token_env="TWO_LINES"), "what TWO_LINES holds is no bearer token"),
    ],
)
def test_what_can_not_be_right_is_said_at_once(
    options: HttpOptions, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMPTY_TOKEN", " ")
    monkeypatch.setenv("TWO_LINES", "a\nb")
    with pytest.raises(RewardError, match=message) as raised:
        endpoint(options)
    assert "secret" not in str(raised.value)
