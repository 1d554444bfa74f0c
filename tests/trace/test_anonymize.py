"""Anonymous copies: nothing that was said is in them, everything that was decided is, and they replay."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from areal_async import cli
from areal_async.audit.auditor import audit
from areal_async.core.orchestrator import Orchestrator
from areal_async.errors import LogError
from areal_async.log.reader import index_payloads, read_payload, read_records
from areal_async.log.turns import read_turns
from areal_async.log.writer import RunLog
from areal_async.messages import (
    AnyEvent,
    AnyRecord,
    Event,
    Failed,
    Joined,
    Lost,
    Note,
    Published,
    Restart,
    RolledBack,
    Rules,
    SampleDone,
    StepDone,
    Swapped,
    Train,
)
from areal_async.replay.deciding import Difference, begin, decide
from areal_async.trace.anonymize import Copied, anonymize, permutation

from ..audit_lies import change, place, records, trains, true_log
from ..core.world import World, make_rules
from .written import write

SECRET = ("The prompt of Müller", "gpu7.intern.example", "/home/mueller/rl", "Traceback: KeyError x", "bad answer")
TOKENS = tuple(range(901, 913))


def copy(folder: Path, out: Path) -> Copied:
    return anonymize(folder / "log", out, lambda torn: None, lambda share: None)


def difference(run: Path) -> Difference | None:
    """The first one between what the log of a run folder has and what the core decides."""
    recorded = read_turns(run / "log")
    assert recorded is not None
    return next(
        (each.difference for each in decide(begin(run, recorded.rules), recorded.turns) if each.difference), None
    )


def bytes_of(run: Path) -> bytes:
    return b"\n".join(name.encode() + path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()
                      for name in [str(path.relative_to(run))])  # fmt: skip


def planted(secrets: Sequence[str]) -> Iterator[AnyRecord]:
    """A log that replays, with secrets wherever there may be words: they come from events, as they would in a run."""
    prompt, host, path, error, reason = secrets
    rules = true_log()[0]
    assert isinstance(rules, Rules)
    core = Orchestrator(rules)
    yield rules
    yield Note(
        at=0.0, what="run", data={"name": prompt, "model.path": path, "python": host, path: 3, "data.train": path}
    )
    yield Note(at=0.0, what=reason, data={"text": prompt, "things": (prompt, 3)})
    for event in (record for record in true_log() if isinstance(record, Event)):
        told = with_words(event, prompt, host, path, error)  # type: ignore[arg-type]
        yield told
        yield from core.handle(told)
        data: dict[str, str | int | float | bool | tuple[int | str, ...] | None] = {
            **{
                "sample": "0.0",
                "from": host,
                "to": f"{host}1",
                "why": error,
                "tokens": 3,
                reason: prompt,
                "x": (path,),
            },
        }
        yield Note(at=told.at, what="continued", data=data)
    yield Note(at=300.0, what="model_saved", data={"reason": "steps_done", "path": path})


def with_words(event: AnyEvent, prompt: str, host: str, path: str, error: str) -> AnyEvent:
    def server(name: str) -> str:
        return f"{host}{name.removeprefix('server')}" if name.startswith("server") else name

    match event:
        case Joined():
            return replace(event, id=server(event.id))
        case Swapped():
            return replace(event, server=server(event.server))
        case Lost():
            return replace(event, id=server(event.id), why=f"{error}\n{path}")
        case Failed():
            return replace(event, why=f"{error}: {prompt}")
        case Published():
            return replace(event, location=f"{path}/v{event.version}.safetensors")
        case RolledBack():
            return replace(event, why=f"{error} on {host}")
        case StepDone():
            return replace(event, metrics={"loss": 0.25, f"of {path}": 1.0})
    return event


def test_nothing_that_was_said_is_in_the_copy(tmp_path: Path) -> None:
    run = write(tmp_path / "run", planted(SECRET), tokens=TOKENS)
    assert all(secret.encode() in bytes_of(run) for secret in SECRET)
    assert np.array(TOKENS[:4], np.int32).tobytes() in bytes_of(run)
    copied = copy(run, tmp_path / "out")
    found = bytes_of(tmp_path / "out")
    assert not [secret for secret in SECRET if secret.encode() in found]
    assert np.array(TOKENS[:4], np.int32).tobytes() not in found
    assert copied.differs_at is None
    assert difference(tmp_path / "out") is None
    report = audit(tmp_path / "out" / "log", payloads=True)
    assert report.proven, report.findings[:3]
    assert replace(report, backs=[]) == replace(audit(run / "log", payloads=True), backs=[])


# (with a letter of their own: hypothesis also tries words of this project, and those are in any copy)
WORDS = st.text(st.characters(codec="utf-8", categories=("Lu", "Ll", "Lo")), min_size=8, max_size=40).map("ξ{}".format)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    secrets=st.lists(WORDS, min_size=5, max_size=5, unique=True), first=st.integers(200, 5000), number=st.integers(0)
)
def test_whatever_was_said(secrets: list[str], first: int, number: int, tmp_path: Path) -> None:
    folder = tmp_path / f"{number}-{hash(tuple(secrets))}-{len(list(tmp_path.iterdir()))}"
    tokens = range(first, first + 12)
    run = write(folder / "run", planted(secrets), tokens=tokens)
    copy(run, folder / "out")
    found = bytes_of(folder / "out")
    assert not [secret for secret in secrets if secret.encode() in found]
    assert np.array(tokens[:4], np.int32).tobytes() not in found
    assert difference(folder / "out") is None
    assert audit(folder / "out" / "log", payloads=True).proven


@pytest.mark.slow
def test_what_stays(tmp_path: Path) -> None:
    run = write(tmp_path / "run", planted(SECRET), tokens=TOKENS)
    copied = copy(run, tmp_path / "out")
    before, after = list(read_records(run / "log")), list(read_records(tmp_path / "out" / "log"))
    assert [type(each.message) for each in before] == [type(each.message) for each in after]
    assert [each.payload for each in before] == [each.payload for each in after]
    words = {"why", "location", "metrics", "data", "what", "id", "server"}
    for old, new in zip(before, after, strict=True):
        ours, theirs = asdict(old.message), asdict(new.message)
        assert {name: ours[name] for name in ours.keys() - words} == {
            name: theirs[name] for name in ours.keys() - words
        }
    assert copied.records == len(before)
    notes = [each.message for each in after if isinstance(each.message, Note)]
    assert notes[2].data["tokens"] == 3
    assert notes[-1].data == {"reason": "steps_done"}
    done = next(each.message for each in after if isinstance(each.message, StepDone))
    assert done.metrics["loss"] == 0.25
    servers = {each.message.id for each in after if isinstance(each.message, Joined)}
    assert servers == {"trainer", "rewards.0", "peer-1", "peer-2"}


@pytest.mark.slow
def test_tokens_are_exchanged_one_for_one(tmp_path: Path) -> None:
    run = write(tmp_path / "run", true_log(), tokens=TOKENS)
    highest = copy(run, tmp_path / "out").highest
    ways: dict[int, int] = {}
    for (header, ref), (other, same) in zip(
        index_payloads(run / "log"), index_payloads(tmp_path / "out" / "log"), strict=True
    ):
        assert (header, ref) == (other, same)
        old, new = read_payload(run / "log", ref).arrays, read_payload(tmp_path / "out" / "log", ref).arrays
        for ours, theirs in zip(old[1:], new[1:], strict=True):
            assert ours.tobytes() == theirs.tobytes()
        for token, hidden in zip(old[0].tolist(), new[0].tolist(), strict=True):
            assert ways.setdefault(token, hidden) == hidden
            assert 0 <= hidden <= highest
    assert max(ways) == highest
    assert len(set(ways.values())) == len(ways) > 9
    assert sum(token == hidden for token, hidden in ways.items()) <= 3


@pytest.mark.slow
def test_each_copy_has_a_key_of_its_own(tmp_path: Path) -> None:
    assert sorted(permutation(b"k" * 32, 500).tolist()) == list(range(500))
    assert permutation(b"k" * 32, 500).tolist() == permutation(b"k" * 32, 500).tolist() != list(range(500))
    run = write(tmp_path / "run", planted(SECRET), tokens=TOKENS)
    copy(run, tmp_path / "a")
    copy(run, tmp_path / "b")
    assert bytes_of(tmp_path / "a" / "log") != bytes_of(tmp_path / "b" / "log")


@pytest.mark.slow
def test_texts_of_the_core_are_made_of_those_of_the_copy(tmp_path: Path) -> None:
    """A run that fails tells why, in words that came with events and that are hashed in the copy."""
    one = World(
        make_rules(retries=1, group_size=2, max_failures=0, servers=2, max_restarts=5, min_group=2), servers=2
    ).start()
    one.lose("server1", "the secret of server1")
    one.wake()
    one.settle("publish", "swap", "read")
    one.answer(one.find("sample")[0], "failed")
    while one.end is None:
        one.answer(one.find("sample", one.find("sample")[0][1])[0], "failed")
    log = records(one)
    assert type(log[-1]).__name__ == "Fail"
    run = write(tmp_path / "run", log)
    copied = copy(run, tmp_path / "out")
    assert (copied.differs_at, difference(tmp_path / "out")) == (None, None)
    last = [record.message for record in read_records(tmp_path / "out" / "log")][-1]
    assert "boom" not in str(last)
    assert "removed " in str(last)
    restart = next(r.message for r in read_records(tmp_path / "out" / "log") if isinstance(r.message, Restart))
    lost = next(r.message for r in read_records(tmp_path / "out" / "log") if isinstance(r.message, Lost))
    assert restart.why == lost.why != ""


def another_advantage(log: list[AnyRecord]) -> list[AnyRecord]:
    number, train = trains(log, 4)
    return change(log, number, samples=(replace(train.samples[0], advantage=0.25), *train.samples[1:]))


def another_text(log: list[AnyRecord]) -> list[AnyRecord]:
    return change(log, place(log, Restart), why="another secret")


def a_missing_command(log: list[AnyRecord]) -> list[AnyRecord]:
    return [record for record in log if not (isinstance(record, Train) and record.step == 3)]


def an_impossible_event(log: list[AnyRecord]) -> list[AnyRecord]:
    return change(log, place(log, SampleDone), attempt=7)


@pytest.mark.slow
@pytest.mark.parametrize("lie", [another_advantage, another_text, a_missing_command, an_impossible_event])
def test_a_difference_stays_where_it_is(lie: Callable[[list[AnyRecord]], list[AnyRecord]], tmp_path: Path) -> None:
    run = write(tmp_path / "run", lie(list(true_log())))
    copied = copy(run, tmp_path / "out")
    before, after = difference(run), difference(tmp_path / "out")
    assert before is not None
    assert after is not None
    assert (before.number, before.place, before.offset) == (after.number, after.place, before.offset)
    assert copied.differs_at == before.number
    assert type(before.recorded) is type(after.recorded)
    assert [field.name for field in before.fields] == [field.name for field in after.fields]
    assert b"another secret" not in bytes_of(tmp_path / "out")


@pytest.mark.slow
def test_what_ends_in_the_middle(tmp_path: Path) -> None:
    run = write(tmp_path / "run", true_log())
    for path in (run / "log" / "decisions.log", run / "log" / "payload-000003.seg"):
        path.write_bytes(path.read_bytes()[:-5])
    torn: list[str] = []
    anonymize(run / "log", tmp_path / "out", lambda each: torn.append(each.path.name), lambda share: None)
    assert torn == ["payload-000003.seg", "decisions.log"]
    before, after = read_turns(run / "log", lambda _: None), read_turns(tmp_path / "out" / "log")
    assert before is not None
    assert after is not None
    assert len(list(before.turns)) == len(list(after.turns))
    assert difference(tmp_path / "out") is None


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write(tmp_path / "run", true_log()), tmp_path / "new" / "out"
    assert cli.main(["trace", str(run), "--anonymize", str(out)]) == 0
    assert "`areal-async replay` gives the same decisions of both" in capsys.readouterr().err
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["log"]
    assert cli.main(["replay", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == 0
    assert cli.main(["trace", str(run), "--anonymize", str(out)]) == 2
    assert f"--anonymize {out}: there is something already" in capsys.readouterr().err
    path = run / "log" / "payload-000001.seg"
    path.write_bytes(path.read_bytes()[:-20] + bytes([path.read_bytes()[-20] ^ 1]) + path.read_bytes()[-19:])
    assert cli.main(["trace", str(run), "--anonymize", str(tmp_path / "other")]) == 1
    assert f"areal-async: {path}: corrupt record at offset" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new", "run"]


def test_arrays_that_nobody_knows_are_not_copied(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log", 1 << 20)
    log.append(true_log()[0])
    log.put("0.0", 0, [np.arange(3, dtype=np.int32)] * 5)
    log.close()
    with pytest.raises(LogError, match=r"sample 0\.0 has other arrays"):
        copy(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
