"""`trace` on logs of real controllers: of a run that was killed and resumed, and of one that drops what is late."""

from pathlib import Path

import pytest

from areal_async.log.reader import read_records
from areal_async.log.turns import read_turns
from areal_async.messages import Event
from areal_async.replay.deciding import begin, decide
from areal_async.trace.anonymize import anonymize
from areal_async.trace.listing import Filter, json_line, kind_named, line, read_items
from areal_async.trace.story import tell
from areal_async.trace.things import thing

from ..replay.logs import BOTH, DROP, WAIT
from .test_lives import check_log
from .written import followed, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("log", BOTH)
def test_lives_are_those_that_the_core_had(log: Path) -> None:
    messages = [record.message for record in read_records(log)]
    ends = [number for number, message in enumerate(messages) if isinstance(message, Event)]
    for end in [*ends[1::13], len(messages)]:  # where the commands of the event before are all there
        check_log(messages[:end])


@pytest.mark.slow
@pytest.mark.parametrize("log", BOTH)
def test_everything_has_a_story(log: Path) -> None:
    _, groups = followed([record.message for record in read_records(log)])
    ids = [str(group.id) for group in groups] + [sample.id for group in groups for sample in group.samples]
    steps = {group.step for group in groups if group.step is not None}
    for name in [*ids, *(f"step {step}" for step in steps), "server 0", "server 1", "rewards.0", "trainer"]:
        lines = list(tell(log, thing(name), lambda _: None))
        assert lines, name
        assert [each.event for each in lines] == sorted(each.event for each in lines)


def test_why_groups_were_stale_and_what_became_of_their_prompts() -> None:
    _, groups = followed([record.message for record in read_records(DROP)])
    stale = next(group for group in groups if group.state == "stale")
    texts = [each.text for each in tell(DROP, thing(str(stale.id)), lambda _: None)]
    assert any(text.startswith("stale: step ") for text in texts)
    assert any(text.startswith("its prompt is asked for again, as group ") for text in texts)
    assert outcomes(groups)["stale"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("log", BOTH)
def test_all_records_have_a_line(log: Path) -> None:
    items = list(read_items(log, lambda _: None))
    assert len(items) == len(list(read_records(log)))
    for item in items:
        assert line(item).isprintable()
        assert json_line(item)
    cancels = Filter(kinds=(kind_named("cancel"),))
    assert (log == DROP) == any(cancels.wants(item) for item in items)


@pytest.mark.slow
@pytest.mark.parametrize("log", [WAIT, DROP])
def test_its_copy_replays(log: Path, tmp_path: Path) -> None:
    copied = anonymize(log, tmp_path / "out", lambda _: None, lambda _: None)
    assert (copied.differs_at, copied.samples) == (None, 0)  # these logs are without their arrays
    recorded = read_turns(tmp_path / "out" / "log")
    assert recorded is not None
    decided = list(decide(begin(tmp_path, recorded.rules), recorded.turns))
    assert len(decided) == copied.events
    assert not any(each.difference for each in decided)
    data = (tmp_path / "out" / "log" / "decisions.log").read_bytes()
    assert not [word for word in (b"Traceback", b"/dev/shm", b"stderr", b"exit code") if word in data]
