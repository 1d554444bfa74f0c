"""The timeline of a log: what viewers can read, and all that the log has."""

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from areal_async.errors import ConfigError
from areal_async.log.turns import Turn, read_turns
from areal_async.messages import (
    GroupRead,
    RolledBack,
    Rules,
    SampleDone,
    Scored,
    StartSample,
    StepDone,
    Swapped,
    Train,
    WhenOlder,
)
from areal_async.trace.lanes import Packing, TraceFile
from areal_async.trace.peers import StateLane
from areal_async.trace.perfetto import Figures, write

from ..audit_lies import records, true_log
from ..core.test_any_order import AnyOrder
from ..core.test_going_back import GoingBack
from ..core.world import World
from .trace_events import Trace
from .written import write as write_log

KINDS = (SampleDone, Scored, GroupRead, StepDone, Swapped)
LOGS = Path(__file__).resolve().parents[1] / "logs"


def drawn(log: Path, out: Path, **options: Any) -> tuple[Trace, Figures]:
    path = out / "trace.json"
    figures = write(log, path, **options)
    trace = Trace(path)
    assert figures.events == len(trace.events)
    assert figures.spans == len(trace.of("X"))
    assert figures.nbytes == path.stat().st_size
    assert [file.name for file in out.iterdir() if file.suffix == ".partial"] == []
    return trace, figures


def turns_of(log: Path) -> tuple[Rules, list[Turn]]:
    found = read_turns(log)
    assert found is not None
    return found.rules, list(found.turns)


def check(log: Path, out: Path) -> tuple[Trace, Figures]:
    """Everything that the log has is there, as often."""
    trace, figures = drawn(log, out)
    _, turns = turns_of(log)
    commands = [command for turn in turns for command in turn.commands]
    starts = [command for command in commands if isinstance(command, StartSample)]
    stays = [span for span in trace.in_process("server ") if "floor" in span["args"]]
    assert Counter((span["name"].split()[0], span["args"]["attempt"]) for span in stays) >= Counter(
        (start.sample, start.attempt) for start in starts
    )
    ended = [span for span in stays if "finish" in span["args"]]
    checks = [span for span in trace.in_process("rewards") if "verdict" in span["args"]]
    steps = [span for span in trace.in_process("trainer") if span["name"].startswith("train step")]
    found = (figures.finished, figures.checks, figures.prompts, figures.steps, figures.swaps)
    assert found[:2] == (len(ended), len(checks))
    assert len(steps) == sum(isinstance(command, Train) for command in commands)
    assert figures.samples == sum(start.attempt == 0 for start in starts)
    came = [sum(type(turn.event) is kind for turn in turns) for kind in KINDS]
    assert all(there <= told for there, told in zip(found, came, strict=True)), "what is told again is drawn once"
    for (process, thread), spans in trace.spans.items():
        lost = [span for span in trace.spans[process, "state"] if span["name"] == "lost"] if "samples" in thread else []
        assert not [(stay, gone) for stay in spans for gone in lost if stay["ts"] < gone["ts"] and overlap(stay, gone)]
    trained = {entry.sample for command in commands if isinstance(command, Train) for entry in command.samples}
    assert {span["name"].split()[0] for span in ended if span["args"]["fate"] == "handed to training"} == trained
    return trace, figures


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """By more than the microsecond that the shortest thing lasts."""
    begin, end = max(one["ts"], other["ts"]), min(one["ts"] + one["dur"], other["ts"] + other["dur"])
    return end - begin > 1


class Walk(AnyOrder):
    """Whatever happened, in whatever order, can be drawn."""

    out: Path

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            look(self.world, self.out)


class WalkBack(GoingBack):
    out: Path

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            look(self.world, self.out)


def look(world: World, out: Path) -> None:
    folder = out / str(len(list(out.iterdir())))
    check(write_log(folder, records(world)) / "log", folder)


WALKS = settings(
    max_examples=15, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("policy", get_args(WhenOlder))
@pytest.mark.parametrize("walk", [Walk, WalkBack])
def test_whatever_happened_can_be_drawn(walk: type[Walk | WalkBack], policy: WhenOlder, tmp_path: Path) -> None:
    machine = type(f"{walk.__name__}{policy}", (walk,), {"policy": policy, "out": tmp_path})
    run_state_machine_as_test(machine, settings=WALKS)


@pytest.mark.parametrize("name", ["wait-gone-back-resumed", "drop-requeue-gone-back"])
def test_recorded_runs(name: str, tmp_path: Path) -> None:
    trace, figures = check(LOGS / name, tmp_path)
    _, turns = turns_of(LOGS / name)
    came = tuple(sum(type(turn.event) is kind for turn in turns) for kind in KINDS)
    assert (figures.finished, figures.checks, figures.prompts, figures.steps, figures.swaps) == came
    names = {span["name"] for spans in trace.spans.values() for span in spans}
    assert any(name.startswith("train step") and name.endswith("(branch 1)") for name in names)
    marks = [mark["name"] for mark in trace.of("i")]
    assert any("back to v" in mark for mark in marks)
    if "resumed" in name:
        assert any("resumed" in mark for mark in marks)
        assert any(name.endswith("cut off") for name in names)
        number = next(n for n, turn in enumerate(turns) if isinstance(turn.event, RolledBack) and turn.event.resumed)
        before, after = (round(turns[n].event.at * 1e6) for n in (number - 1, number))
        spans = [span for spans in trace.spans.values() for span in spans if span["ts"] <= before]
        assert all(span["ts"] + span["dur"] <= max(before, span["ts"]) + 1 <= after for span in spans)
    again = [points for points in trace.arrows.values() if points[0]["cat"] == "trained again"]
    assert again
    assert figures.arrows == len({p[0]["name"] for p in trace.arrows.values() if p[0]["cat"] == "samples"})
    assert figures.followed == 1


def test_one_sample_from_its_prompt_to_its_step(tmp_path: Path) -> None:
    """By hand, from the true log: the first attempt of sample 0.0 fails at 14 s."""
    log = write_log(tmp_path / "run", true_log()) / "log"
    trace, _ = drawn(log, tmp_path, sample="0.0")
    (points,) = [points for points in trace.arrows.values() if points[0]["cat"] == "samples"]
    assert {point["name"] for point in points} == {"0.0"}
    way = [(trace.lane(point), point["ts"]) for point in points]
    spans = [next(s for s in trace.spans[lane] if s["ts"] <= at < s["ts"] + s["dur"]) for lane, at in way]
    s = 1_000_000
    processes = [lane[0] for lane, _ in way]
    assert [
        (process, span["name"], span["ts"], span["ts"] + span["dur"])
        for process, span in zip(processes, spans, strict=True)
    ] == [
        ("prompts", "group 0", 6 * s, 8 * s),
        ("server server0", "0.0 failed", 8 * s, 14 * s),
        ("server server0", "0.0", 14 * s, 26 * s),
        ("rewards", "0.0 right", 26 * s, 38 * s),
        ("trainer", "train step 1", 45 * s, 46 * s),
    ]
    assert spans[1]["args"]["why"] == "boom"
    told = {"attempt": 1, "floor": 0, "versions": "0", "length": 1, "finish": "length", "verdict": "right"}
    told |= {"reward": 0.0, "step": 1, "lag": 1, "server": "server0", "fate": "handed to training"}
    assert told.items() <= spans[2]["args"].items()
    with pytest.raises(ConfigError, match=r"no sample 99\.0 was started"):
        drawn(log, tmp_path, sample="99.0")


def test_a_wave_goes_over_all_servers(tmp_path: Path) -> None:
    """One server after another is given a version: one span, from the first swap's beginning to the last's end."""
    log = write_log(tmp_path / "run", true_log()) / "log"
    trace, _ = drawn(log, tmp_path)
    for wave in trace.in_process("weights"):
        servers = wave["args"]["servers"].split(", ")
        swaps = [s for s in trace.in_process("server ") if s["name"].startswith("swapping") and overlap(s, wave)]
        assert len(servers) == len(swaps)
        assert wave["ts"] == pytest.approx(min(swap["ts"] for swap in swaps), abs=2)
        assert wave["ts"] + wave["dur"] == pytest.approx(max(swap["ts"] + swap["dur"] for swap in swaps), abs=2)
    assert max(len(wave["args"]["servers"].split(", ")) for wave in trace.in_process("weights")) == 2


def test_what_comes_too_late_changes_nothing(tmp_path: Path) -> None:
    """The first attempt of sample 0.0 has failed, its second is running: then the first one's answer comes."""
    log = list(true_log())
    answer = next(record for record in log if isinstance(record, SampleDone) and record.sample == "0.0")
    second = next(n for n, r in enumerate(log) if isinstance(r, StartSample) and (r.sample, r.attempt) == ("0.0", 1))
    late = msgspec.structs.replace(answer, at=20.0, attempt=0)
    place = next(n for n, record in enumerate(log) if n > second and getattr(record, "at", 0) >= late.at)
    told = [*log[:place], late, *log[place:]]
    plain, _ = drawn(write_log(tmp_path / "plain", log) / "log", tmp_path)
    trace, _ = drawn(write_log(tmp_path / "late", told) / "log", tmp_path)
    assert trace.in_process("server ") == plain.in_process("server ")
    assert [p["ts"] for points in trace.arrows.values() for p in points] == [
        p["ts"] for points in plain.arrows.values() for p in points
    ]


def test_things_of_one_microsecond_lie_beside_each_other(tmp_path: Path) -> None:
    """Whatever begins and ends when; as many lanes as things at a time need, and no more."""
    random = Random(1)
    path = tmp_path / "trace.json"
    with path.open("wb") as out:
        file = TraceFile(out)
        for process in ("a", "b"):
            file.process(process, 0)
        state, packing = StateLane(file, "a", "state"), Packing()
        begun: list[tuple[int, int]] = []
        most = 0
        for at in sorted(random.choices(range(60), k=300)):
            state.go(f"state {at}", at)
            if begun and random.random() < 0.6:
                number, begin = begun.pop(random.randrange(len(begun)))
                end = max(at, begin + 1)
                file.span(file.lane("b", str(number)), "x", begin, end, {})
                packing.leave(number, end)
            number = packing.take(at)
            most = max(most, number)
            begun.append((number, at))
        state.end(60)
        for number, begin in begun:
            file.span(file.lane("b", str(number)), "x", begin, 61, {})
        file.close({})
    trace = Trace(path)
    for lane, spans in trace.spans.items():
        ordered = sorted(spans, key=lambda span: span["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(ordered)), lane
    spans = trace.in_process("b")
    at_a_time = max(sum(s["ts"] <= at < s["ts"] + s["dur"] for s in spans) for at in range(61))
    assert most == len([lane for lane in trace.spans if lane[0] == "b"]) == at_a_time


def test_of_many_samples_evenly_chosen_groups_have_arrows(tmp_path: Path) -> None:
    log = write_log(tmp_path / "run", true_log()) / "log"
    trace, figures = drawn(log, tmp_path, most_arrows=8)
    assert figures.followed == 4  # 28 samples were started
    groups = {p[0]["name"].split(".")[0] for p in trace.arrows.values() if p[0]["cat"] == "samples"}
    assert groups == {"0", "4", "12"}  # 8 was cancelled before its prompt was read
    assert figures.arrows <= 8


def test_a_compressed_file_has_the_same_events(tmp_path: Path) -> None:
    log = write_log(tmp_path / "run", true_log()) / "log"
    write(log, tmp_path / "a.json")
    figures = write(log, tmp_path / "a.json.gz")
    assert figures.nbytes == (tmp_path / "a.json.gz").stat().st_size
    assert json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes())) == json.loads(
        (tmp_path / "a.json").read_bytes()
    )
