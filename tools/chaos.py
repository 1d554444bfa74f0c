"""Kills controllers at many points, or lets a run meet seeded faults, and checks the books afterwards: docs/chaos.md.

python tools/chaos.py kills --points 200 --seed 1 --jobs 2
python tools/chaos.py kills --seed 1 --point 17            one of them again
python tools/chaos.py run --seed 3 --faults 4
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from areal_async.testing import chaos
from areal_async.testing.crash import PLACES, Point
from areal_async.testing.kill_points import RUNS, KillPoint, KillPoints, Outcome


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    kills = commands.add_parser("kills", help="kill controllers at many points")
    kills.add_argument("--points", type=int, default=26, help="how many (default: two at each place)")
    kills.add_argument("--first", type=int, default=0, help="number of the first one")
    kills.add_argument("--point", type=int, help="this one alone")
    kills.add_argument("--again", help="exactly this one, as it is printed where something was wrong")
    kills.add_argument("--seed", type=int, default=0)
    kills.add_argument("--jobs", type=int, default=1, help="points at the same time")
    kills.add_argument("--only", action="append", choices=list(PLACES), default=[], help="this place; may be repeated")
    kills.add_argument("--seconds", type=float, default=3600.0, help="begin no further point after so long")
    kills.set_defaults(do=do_kills)
    run = commands.add_parser("run", help="let runs meet seeded faults")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--seeds", type=int, default=1, help="so many seeds, from --seed on")
    run.add_argument("--faults", type=int, default=4)
    run.add_argument("--schedule", help="these faults in place of the seed's, as a failing run prints them")
    run.add_argument("--shortest", action="store_true", help="if one fails, look for the shortest that does")
    run.add_argument("--seconds", type=float, default=3600.0, help="begin no further seed after so long")
    run.set_defaults(do=do_run)
    arguments = parser.parse_args(argv)
    return int(arguments.do(arguments))


def do_kills(arguments: argparse.Namespace) -> int:
    """A table of places; the points where something was wrong, with how to repeat each."""
    numbers = range(arguments.first, arguments.first + arguments.points)
    again = msgspec.json.decode(arguments.again, type=KillPoint) if arguments.again else None
    if arguments.point is not None or again is not None:
        numbers = range(again.number if again else arguments.point, 1 + (again.number if again else arguments.point))
    begun = time.monotonic()
    with folder_for_runs() as root:
        shared = set(os.listdir("/dev/shm"))
        points = KillPoints(arguments.seed, root, tuple(arguments.only))

        def try_one(number: int) -> Outcome | None:
            if time.monotonic() - begun > arguments.seconds:
                return None
            return points.try_point(again or points.point(number))

        outcomes: list[Outcome] = []
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for outcome in pool.map(try_one, numbers):
                if outcome is not None:
                    outcomes.append(outcome)
                    _tell(outcome)
        left = sorted(set(os.listdir("/dev/shm")) - shared)
    print(_table(outcomes))
    if len(outcomes) < len(numbers):
        print(f"the time was up: go on with --first {numbers[0] + len(outcomes)}")
    if left:
        print(f"left in /dev/shm: {', '.join(left)}")
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    killed = sum(len(outcome.deaths) for outcome in outcomes)
    gone_s = max((outcome.gone_s for outcome in outcomes), default=0.0)
    print(
        f"{len(outcomes)} points, {killed} controllers killed, {wrong} points with something wrong; all processes gone"
        f" within {gone_s:.2f} s; {time.monotonic() - begun:.0f} s"
    )
    return 1 if wrong or left else 0


def do_run(arguments: argparse.Namespace) -> int:
    """Each seed's schedule and what is wrong; a failing one as something to paste."""
    schedule = chaos.read(arguments.schedule) if arguments.schedule else None
    begun, failed = time.monotonic(), 0
    with folder_for_runs() as root:
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            if time.monotonic() - begun > arguments.seconds:
                print(f"the time was up: go on with --seed {seed}")
                break
            report = chaos.chaos(
                seed, faults=arguments.faults, folder=root, schedule=schedule, shortest=arguments.shortest
            )
            print(report, flush=True)
            if report.wrong:
                failed += 1
                print(f"again: tools/chaos.py run --schedule '{chaos.written(report.schedule)}'\nsee {report.folder}")
    return 1 if failed else 0


@contextlib.contextmanager
def folder_for_runs() -> Iterator[Path]:
    """Removed, unless a run in it was kept."""
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        yield root
    finally:
        with contextlib.suppress(OSError):
            root.rmdir()


def _tell(outcome: Outcome) -> None:
    point = outcome.point
    deaths = ", then ".join(_words(death) for death in outcome.deaths) or "nowhere"
    run = RUNS[point.run]
    words = f"point {point.number}: η {run.eta}, {run.ranks} rank(s), died {deaths}, {outcome.seconds:.1f} s"
    print(f"{'WRONG ' if outcome.wrong else ''}{words}", flush=True)
    if outcome.wrong:
        print(f"  again: tools/chaos.py kills --again '{msgspec.json.encode(point).decode()}'")
        print(f"  see {outcome.folder}")
        print("".join(f"  {line}\n" for why in outcome.wrong for line in why.splitlines()), end="", flush=True)


def _words(point: Point) -> str:
    return f"{point.place} {point.number}"


def _table(outcomes: list[Outcome]) -> str:
    tried = Counter(outcome.point.place for outcome in outcomes)
    wrong = Counter(outcome.point.place for outcome in outcomes if outcome.wrong)
    killed = Counter(death.place for outcome in outcomes for death in outcome.deaths)
    rows = [f"{place:12} {tried[place]:6} {killed[place]:7} {wrong[place]:6}" for place in PLACES]
    return "\n".join([f"{'place':12} {'points':>6} {'killed':>7} {'wrong':>6}", *rows])


if __name__ == "__main__":
    sys.exit(main())
