"""Controllers that are killed at many points, resumed, and killed again, with the books checked after each.

What always holds: a point follows from its seed, its number and how often each place is passed: which run (η, ranks),
where its first controller dies, whether its second one does, and whether the third waits until all processes of the
dead are gone. Passes are counted in a run that nobody kills, and in one that is resumed; they differ a little from one
time to the next, so a point that is to be tried again exactly is written down whole (`KillPoint`).
"""

import contextlib
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from areal_async.testing import books
from areal_async.testing.books import Moment, Wanted
from areal_async.testing.crash import PLACES, Life, Point
from areal_async.testing.lives import LifeEnd, live, wait_for_the_end_of_all
from areal_async.testing.small_run import write_small_run

KILLED: Final = -9
IN_A_RESUME: Final = ("reading", "going back")  # places that only a resumed controller passes
DRY_KILL: Final = Point("sent", 4)  # where the run that is resumed to count its passes was killed: step 4, or 2 of two
TOKEN_S: Final = 0.0005
STEP_S: Final = 0.01
NOTHING_LEFT: Final = "nothing to resume"
TRIES: Final = 3  # a run takes its own course, so a late pass may not come; then the last one that did is taken

RUNS: Final = (
    Wanted(steps=6, batch_groups=2, group_size=2, ranks=2, eta=2, seed=7),
    Wanted(steps=6, batch_groups=2, group_size=2, ranks=1, eta=0, seed=7, keep=1),
)


class KillPoint(msgspec.Struct, frozen=True):
    """One of many. place: what it was drawn for. run: number in `RUNS`. first, second: where the controllers die;
    second: None where the resumed one lives. at_once: the next controller begins while processes of the dead one may
    still be ending."""

    number: int
    place: str
    run: int
    first: Point
    second: Point | None
    at_once: bool


@dataclass(frozen=True)
class Outcome:
    """point: with the passes that really came, so that it can be tried again exactly. deaths: where controllers really
    died. wrong: what isn't as it should be. gone_s: until all processes of a dead controller were gone, the longest.
    folder: kept where something was wrong."""

    point: KillPoint
    deaths: tuple[Point, ...]
    wrong: tuple[str, ...]
    seconds: float
    gone_s: float
    folder: Path | None = None


class KillPoints:
    """The points of a seed. folder: where runs are made. only: places that are taken, all if empty."""

    def __init__(self, seed: int, folder: Path, only: tuple[str, ...] = ()) -> None:
        self._seed = seed
        self._folder = folder
        self._places = only or tuple(PLACES)
        self._counted: dict[tuple[int, bool], Mapping[str, int]] = {}
        self._lock = threading.Lock()

    def point(self, number: int) -> KillPoint:
        """The places one after another, so that none is left out; a pass drawn from all of its passes alike."""
        draw = random.Random(f"{self._seed}/{number}")
        run = draw.randrange(len(RUNS))
        place = self._places[number % len(self._places)]
        if place in IN_A_RESUME:
            first = self._draw(draw, run, draw.choice([p for p in PLACES if p not in IN_A_RESUME]), resumed=False)
            return KillPoint(number, place, run, first, self._draw(draw, run, place, resumed=True), draw.random() < 0.5)
        first, second = self._draw(draw, run, place, resumed=False), None
        if draw.random() < 1 / 3:
            second = self._draw(draw, run, draw.choice(list(PLACES)), resumed=True)
        return KillPoint(number, place, run, first, second, draw.random() < 0.5)

    def _draw(self, draw: random.Random, run: int, place: str, *, resumed: bool) -> Point:
        passes = self.passes(run, resumed=resumed).get(place, 0)
        return Point(place, draw.randint(1, max(passes, 1)), draw.random())

    def passes(self, run: int, *, resumed: bool) -> Mapping[str, int]:
        """How often each place is passed by a controller that nobody kills; resumed: that goes on after another one."""
        with self._lock:
            if (run, resumed) not in self._counted:
                with _place_for_a_run(self._folder) as folder:
                    trial = _Trial(folder, RUNS[run])
                    if resumed:
                        trial.live(DRY_KILL)
                    self._counted[run, resumed] = trial.live(None)
            return self._counted[run, resumed]

    def try_point(self, point: KillPoint) -> Outcome:
        """Live it through, check, and remove its folder if all is well."""
        begun = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f"k{point.number}-", dir=self._folder))
        trial = _Trial(folder, RUNS[point.run])
        deaths: list[Point | None] = []
        try:
            for place in (point.first, point.second):
                deaths.append(trial.die(place) if place is not None else None)
                if not point.at_once:
                    trial.wait()
            if not trial.ended:
                trial.live(None)
            wrong = trial.wrong()
        except StoppedMoving as error:
            wrong = [str(error)]
        wrong += trial.left()
        if not wrong:
            shutil.rmtree(folder)
        if deaths and deaths[0] is not None:
            point = msgspec.structs.replace(point, first=deaths[0], second=deaths[1] if len(deaths) > 1 else None)
        died = tuple(place for place in deaths if place is not None)
        seconds = time.monotonic() - begun
        return Outcome(point, died, tuple(wrong), seconds, trial.gone_s, folder if wrong else None)


class StoppedMoving(Exception):
    """A life failed, or didn't end, where it should have."""


class _Trial:
    """One run folder and its lives."""

    def __init__(self, folder: Path, wanted: Wanted) -> None:
        self._wanted = wanted
        overrides = (
            f"train.ranks={wanted.ranks}",
            f"rollout.max_staleness={wanted.eta}",
            f"seed={wanted.seed}",
            f"checkpoint.keep={wanted.keep}",
        )
        self._life = Life(
            config=str(write_small_run(folder, *overrides)),
            run_dir=str(folder / "run"),
            books=str(folder / "trainer.jsonl"),
            server_book=str(folder / "servers.jsonl"),
            counts=str(folder / "passes.json"),
            token_s=TOKEN_S,
            step_s=STEP_S,
        )
        self._folder = folder
        self._ends: list[LifeEnd] = []
        self._moments: list[Moment] = []
        self._open: list[str] = []  # marks of lives whose processes may be there
        self.gone_s = 0.0
        self.ended = False
        self._left: list[str] = []

    def die(self, point: Point) -> Point | None:
        """Live until it dies there. A pass that doesn't come: the run has ended, and is begun anew if it was the first
        life (then an earlier pass is taken), or is left ended."""
        for _ in range(TRIES):
            passes = self.live(point)
            if not self.ended:
                return point
            if len(self._ends) > 1 or not passes.get(point.place):
                return None
            self._anew()
            point = msgspec.structs.replace(point, number=min(point.number, passes[point.place]))
        return None

    def live(self, point: Point | None) -> Mapping[str, int]:
        """One life. The passes of one that ended. Raises StoppedMoving if it failed or stood still."""
        resume = books.has_begun(Path(self._life.run_dir))
        if not resume:  # it died before it had written anything: there is nothing to go on with, it is begun again
            shutil.rmtree(self._life.run_dir, ignore_errors=True)
        end = live(msgspec.structs.replace(self._life, point=point, resume=resume))
        self._ends.append(end)
        self._open.append(end.mark)
        if end.code == KILLED:
            self._moments.append(books.moment(Path(self._life.run_dir), Path(self._life.server_book)))
            return {}
        if NOTHING_LEFT in end.said:  # it died when all was done
            self.ended = True
            return {}
        if end.code != 0:
            what = "did not end" if end.code is None else f"ended with {end.code}"
            raise StoppedMoving(f"life {len(self._ends)} {what}:\n{end.said[-3000:]}")
        self.ended = True
        assert self._life.counts is not None
        return msgspec.json.decode(Path(self._life.counts).read_bytes(), type=dict[str, int])

    def wait(self) -> None:
        """Until the processes of all lives are gone."""
        for mark in self._open:
            seconds, left = wait_for_the_end_of_all(mark)
            self.gone_s = max(self.gone_s, seconds)
            self._left += left
        self._open.clear()

    def left(self) -> list[str]:
        """What is left of all lives: processes, files in shared memory, sockets."""
        self.wait()
        found = [f"a process is left: {line}" for line in self._left]
        run_dir = Path(self._life.run_dir)
        found += [f"{path} is left in shared memory" for path in books.published(run_dir) if path.exists()]
        if not any(moment.at_the_end for moment in self._moments):
            found += [f"{path} is left" for path in books.sockets_left(self._folder / "s")]
        return found

    def wrong(self) -> list[str]:
        """What the books and the log have against it."""
        run_dir, wanted = Path(self._life.run_dir), self._wanted
        lines, entries = books.read_trainer(Path(self._life.books)), books.read_servers(Path(self._life.server_book))
        return [
            *books.trained_once(lines, wanted),
            *books.same_batches_again(lines),
            *books.states_follow(lines),
            *books.order_of_data(lines, entries, wanted),
            *books.not_generated_again(Path(self._life.server_book), self._moments),
            *books.asked_once(entries),
            *books.ages_by_servers(lines, entries, wanted),
            *books.nothing_lost(run_dir, lines, wanted),
            *books.graded_once(run_dir),
            *books.audited(run_dir),
            *books.decided_again(run_dir),
            *books.ages_by_log(run_dir, wanted),
            *books.metrics_complete(run_dir, wanted),
            *books.folder_tidy(run_dir, wanted),
        ]

    def _anew(self) -> None:
        self.wait()
        shutil.rmtree(self._folder)
        self._folder.mkdir()
        fresh = _Trial(self._folder, replace(self._wanted))
        self._ends, self._moments, self.ended, self._life = [], [], False, fresh._life


@contextlib.contextmanager
def _place_for_a_run(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dry-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
