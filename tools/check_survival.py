"""Whether real runs (vLLM, DeepSpeed, the quickstart's model) survive `kill -9`, of their children and of themselves.

    python tools/check_survival.py children [--steps 90] [--json]        each kind of child, one after another
    python tools/check_survival.py controller [--points 10] [--json]     the controller, then `--resume`

Prints a line for each thing that was killed; exit 1 if something doesn't hold. With all 90 steps the model is scored
on the held-out problems (`areal-async eval`). What each line says is of this machine, with nothing else running on it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from areal_async import process_tree
from areal_async.cli_why import Found, look
from areal_async.core.view import PeerView
from areal_async.log.reader import read_records
from areal_async.messages import (
    AnyEvent,
    Event,
    Joined,
    Lost,
    RolledBack,
    Scored,
    StepDone,
    Swapped,
)
from areal_async.testing import crash

ROOT: Final = Path(__file__).resolve().parent.parent
CONFIG: Final = ROOT / "configs" / "quickstart.yaml"
FULL: Final = 90  # steps after which the model is scored
SCORE: Final = 0.92
GONE_S: Final = 10.0  # after the controller's death nothing of it may live longer
SAME: Final = 1e-5  # between the losses of a step that was trained twice, from the same state with the same batch
BETWEEN: Final = 3  # steps between two kills
EVERY: Final = 5  # steps between checkpoints where children are killed
PATIENCE_S: Final = 240.0  # for a process to start, or a few steps
END_S: Final = 1200.0  # for all of the steps
SMALL: Final = (
    "train.batch_groups=8", "train.minibatches=2", "rollout.group_size=4", "rollout.max_concurrent=64",
)  # fmt: skip
MARK: Final = "AREAL_SURVIVAL"  # in the environment of everything that a program starts

# Where the controller dies: (place, the pass of it). docs: areal_async.testing.crash.PLACES
POINTS: Final = (
    crash.Point("swap", 22), crash.Point("checkpoint", 14), crash.Point("answered", 5), crash.Point("record", 150),
    crash.Point("sent", 6), crash.Point("saving", 4), crash.Point("event", 90), crash.Point("command", 700),
    crash.Point("payload", 120), crash.Point("swap", 27),
)  # fmt: skip
IN_RESUME: Final = crash.Point("going back", 1)  # the third one is killed once more, as it goes on


class Wrong(Exception):
    """Something doesn't hold."""


class Program:
    """A run in a process of its own. point: where it kills itself."""

    def __init__(self, run: Path, options: Sequence[str], point: crash.Point | None = None) -> None:
        self.run = run
        self.output = run.with_suffix(".txt")
        self._mark = uuid.uuid4().hex
        argv = [sys.executable, __file__, "life", msgspec.json.encode(point).decode(), str(run)]
        argv += ["run", str(CONFIG), "--run-dir", str(run), *options]
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                argv, stdout=file, stderr=file, cwd=ROOT, env={**os.environ, MARK: self._mark}, start_new_session=True
            )

    def wait_for(self, there: Callable[[], bool], what: str) -> float:
        """Seconds until it is so."""
        begun = time.monotonic()
        while not there():
            if self.process.poll() is not None:
                raise Wrong(f"{what}: the run ended with {self.process.returncode}:\n{self.text()}")
            if time.monotonic() > begun + PATIENCE_S:
                raise Wrong(f"{what}: not so after {PATIENCE_S:g} s:\n{self.text()}")
            time.sleep(0.1)
        return time.monotonic() - begun

    def rows(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def text(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-30:])

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Wrong(f"the run has not ended after {END_S:g} s:\n{self.text()}") from None

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.gone_after_s()

    def gone_after_s(self) -> float:
        """Seconds from its end until nothing that it had started lives."""
        begun = time.monotonic()
        while left := process_tree.marked(MARK, self._mark):
            if time.monotonic() > begun + GONE_S:
                raise Wrong(f"{GONE_S:g} s after the end of the controller these live: {left}")
            time.sleep(0.05)
        return time.monotonic() - begun


# ------------------------------------------------------------------------------------------------------- the children


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def find(found: Found, child: str, what: str) -> int:
    """A process of a child, the child itself or something below it, by words of its command."""
    (top,) = (process.pid for process in found.children if process.name == child)
    matching = [pid for pid in (top, *process_tree.descendants(top)) if what in command(pid)]
    if not matching:
        raise Wrong(f"{child} has no process {what!r}: {[command(pid)[:80] for pid in process_tree.descendants(top)]}")
    return matching[-1]


# what is killed -> (file of the child's output, words of the command, how the core calls it)
KINDS: Final = {
    "engine": ("server-0", "VLLM::EngineCore", "server 0"),
    "rank": ("trainer", "-m areal_async.engines.deepspeed.rank", "trainer"),
    "reward worker": ("rewards.0", "-m areal_async.rewards.worker", "reward worker rewards.0"),
    "sandbox": ("rewards.0", "-m areal_async.rewards.forkserver", ""),
    "server": ("server-0", "vllm.entrypoints.openai.api_server", "server 0"),
    "worker of the engine": ("server-0", "VLLM::Worker", "server 0"),
}


def peer(found: Found, label: str) -> PeerView | None:
    peers = found.status.peers if found.status is not None else ()
    return next((peer for peer in peers if peer.label == label), None)


def is_well_again(found: Found, label: str, before: Found) -> bool:
    """Whether one that was killed after `before` is there again."""
    now, then = peer(found, label), peer(before, label)
    if now is None or then is None or found.status is None or before.status is None:
        return False
    if label == "trainer":
        return found.status.branch > before.status.branch and now.state in ("idle", "training")
    return now.restarts > then.restarts and now.state in ("serving", "updating", "working")


def children(options: argparse.Namespace, run: Path) -> dict[str, Any]:
    """Kill one of each kind, with steps in between. The run must end by itself, as one where nobody was killed."""
    small = SMALL if options.steps < FULL else ()
    program = Program(run, [f"train.steps={options.steps}", f"checkpoint.every_steps={EVERY}", *small])
    killed: list[tuple[str, float]] = []
    try:
        for kind in options.kinds.split(","):
            killed.append((kind, kill_one(program, kind, len(program.rows()) + (BETWEEN if killed else 1))))
        if code := program.end():
            raise Wrong(f"the run ended with {code}:\n{program.text()}")
        gone_s = program.gone_after_s()
    finally:
        program.kill()
    events = [record.message for record in read_records(run / "log") if isinstance(record.message, Event)]
    kills = [{"killed": kind, "at": round(at, 1), **again(kind, at, events)} for kind, at in killed]
    return {"kills": kills, "gone_after_s": round(gone_s, 2), **ended(program, options.steps)}


def kill_one(program: Program, kind: str, steps: int) -> float:
    """Once so many steps are done, and wait until it works again. Returns the run clock then."""
    child, words, label = KINDS[kind]

    def is_time() -> bool:
        rows = program.rows()
        between = kind != "rank" or not rows or 2 <= rows[-1]["version"] % EVERY <= 3  # then steps are trained twice
        return len(rows) >= steps and between and (not label or peer(look(program.run), label) is not None)

    program.wait_for(is_time, f"steps before the {kind} is killed")
    before = look(program.run)
    assert before.status is not None
    at = before.status.at + time.time() - before.status.time
    os.kill(find(before, child, words), signal.SIGKILL)
    if label:
        program.wait_for(lambda: is_well_again(look(program.run), label, before), f"the {kind} is there again")
    else:
        program.wait_for(lambda: len(program.rows()) > steps + 1, f"the {kind} is there again")
    return at


def again(kind: str, at: float, events: Sequence[AnyEvent]) -> dict[str, Any]:
    """When it was noticed, and when it worked again, seconds after it was killed."""
    after = [event for event in events if event.at >= at]
    if kind == "sandbox":
        works = next(e for e in after if isinstance(e, Scored) and e.at > at + 0.01 and e.reward is not None)
        return {"works_again_s": round(works.at - at, 2)}
    lost = next(event for event in after if isinstance(event, Lost))
    if kind == "rank":
        back = next(event for event in after if isinstance(event, RolledBack))
        works_at = next(e.at for e in after if isinstance(e, StepDone) and e.at > back.at)
        more = {"back_to": back.to}
    else:
        there = Joined if lost.peer == "rewards" else Swapped
        works_at = next(event.at for event in after if isinstance(event, there) and event.at > lost.at)
        more = {}
    return {"lost_s": round(lost.at - at, 2), "works_again_s": round(works_at - at, 2), **more}


# ----------------------------------------------------------------------------------------------------- the controller


def controller(options: argparse.Namespace, run: Path) -> dict[str, Any]:
    """Kill it at each point in a run of its own, resume it there, and let it end."""
    numbers = range(options.first, min(options.first + options.points, len(POINTS)))
    points = []
    for number in numbers:
        points.append(one_point(options, run.with_name(f"{run.name}-{number}"), number))
        print(in_words(points[-1]), file=sys.stderr, flush=True)  # the next one takes a minute
    return {"points": points}


def one_point(options: argparse.Namespace, run: Path, number: int) -> dict[str, Any]:
    settings = [f"train.steps={options.steps}", "checkpoint.every_steps=3", *SMALL]
    deaths = [POINTS[number], *([IN_RESUME] if number == 2 else [])]
    gone = []
    for life, point in enumerate(deaths):
        program = Program(run, [*settings, *(["--resume"] if life else [])], point)
        try:
            if (code := program.end()) != -signal.SIGKILL:
                raise Wrong(
                    f"it was not killed at {point.place} {point.number} but ended with {code}: {program.text()}"
                )
            gone.append(round(program.gone_after_s(), 2))
        finally:
            program.kill()
    steps_before = len(program.rows())
    begun = time.monotonic()
    program = Program(run, [*settings, "--resume"])
    try:
        program.wait_for(lambda: len(program.rows()) > steps_before, "a step after the resume")
        first_step_s = time.monotonic() - begun
        if code := program.end():
            raise Wrong(f"the resumed run ended with {code}:\n{program.text()}")
        program.gone_after_s()
    finally:
        program.kill()
    if not (run / "model" / "model.safetensors").exists():
        raise Wrong(f"{run}: no model was saved")
    return {
        "killed_in": [f"{point.place} {point.number}" for point in deaths],
        "steps_before": steps_before,
        "gone_after_s": max(gone),
        "first_step_after_s": round(first_step_s, 1),
        **ended(program, options.steps),
    }


# ------------------------------------------------------------------------------------------------------------ the end


def ended(program: Program, steps: int) -> dict[str, Any]:
    """What holds of every run that has ended: all steps, a clean log, and the same losses where a
    step was trained twice."""
    rows = program.rows()
    if sorted({row["step"] for row in rows}) != list(range(steps)):
        raise Wrong(f"{program.run}: steps {[row['step'] for row in rows]} were trained, not all of {steps}")
    told = subprocess.run(
        [sys.executable, "-m", "areal_async", "audit", str(program.run)], capture_output=True, text=True, cwd=ROOT
    )
    if told.returncode:
        raise Wrong(f"{program.run}: audit says\n{told.stdout}{told.stderr}")
    twice, largest = difference(rows)
    if largest > SAME:
        raise Wrong(f"{program.run}: losses of steps that were trained twice differ by {largest:.1e}")
    found: dict[str, Any] = {"steps": steps, "seconds": rows[-1]["time_s"], "trained_twice": twice,
                             "loss_difference": largest}  # fmt: skip
    if steps >= FULL:
        found["score"] = score(program.run / "model")
        if found["score"] < SCORE:
            raise Wrong(f"{program.run}: the model scores {found['score']}, not {SCORE}")
    return found


def difference(rows: Sequence[dict[str, Any]]) -> tuple[int, float]:
    """How many steps were trained again, and the largest difference of their losses."""
    losses = defaultdict(list)
    for row in rows:
        losses[row["step"]].append(row["loss"])
    again = {step: values for step, values in losses.items() if len(values) > 1}
    return len(again), max((max(values) - min(values) for values in again.values()), default=0.0)


def score(model: Path) -> float:
    argv = [sys.executable, "-m", "areal_async", "eval", str(CONFIG), "--model", str(model), "--json"]
    out = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return float(json.loads(out)["score"])


def in_words(figures: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value}" for key, value in figures.items())


def live(arguments: Sequence[str]) -> int:
    """The command line in this process, with a trap set: arguments are the point, the run folder, the command."""
    from areal_async.cli import main as command_line

    point = msgspec.json.decode(arguments[0], type=crash.Point | None)
    if point is not None:
        crash.install(crash.Trap(point), Path(arguments[1]), resumed="--resume" in arguments)
    return command_line(arguments[2:])


def main() -> int:
    if sys.argv[1:2] == ["life"]:
        return live(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("children", "controller"))
    parser.add_argument("--steps", type=int, help=f"training steps (children: {FULL}, controller: 12)")
    parser.add_argument("--points", type=int, default=len(POINTS), help="how often the controller is killed")
    parser.add_argument("--first", type=int, default=0, help="the first of these points")
    parser.add_argument("--kinds", default=",".join(KINDS), help="what is killed, of the children")
    parser.add_argument("--runs", type=Path, help="folder for the run folders (default: a new one)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    options.steps = options.steps or (FULL if options.what == "children" else 12)
    runs = (options.runs or Path(tempfile.mkdtemp(prefix="areal-survival-"))).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    try:
        told = (children if options.what == "children" else controller)(options, runs / options.what)
    except Wrong as wrong:
        print(f"DOES NOT HOLD: {wrong}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(told))
        return 0
    for one in (*told.pop("kills", ()), *told.pop("points", ()), *([told] if told else [])):
        print(in_words(one))
    print(f"folders: {runs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
