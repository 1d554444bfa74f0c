"""Runs that meet faults at seeded moments, and the shortest schedule of faults that still makes one fail.

    report = chaos(seed=3, faults=4, folder=tmp_path)
    assert not report.wrong, report

What always holds: the schedule follows from the seed; a moment is an event of the run ("after the 5th step_done"), so
the same schedule meets the same run again, as far as processes allow. After every event the ledger must balance; at the
end every step was trained once, by the books of the peers, no trained token is older than η, and no process is left.
"""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from areal_async.testing import books
from areal_async.testing.books import Moment, Wanted
from areal_async.testing.crash import Life
from areal_async.testing.faults import After, Deed, Fault, Journal
from areal_async.testing.lives import live, wait_for_the_end_of_all
from areal_async.testing.shrink import shrink
from areal_async.testing.small_run import write_small_run
from areal_async.testing.vllm_server import Break, Order, Stall, Status
from areal_async.testing.vllm_server import Fault as ServerFault

WANTED: Final = Wanted(steps=8, batch_groups=2, group_size=2, ranks=2, eta=2, seed=7, faultless=False)
OPTIONS: Final = (
    # As many restarts as there are faults, and deadlines that fit answers of milliseconds
    "rollout.retries=10", "rollout.max_failures=4", "rollout.sample_timeout_s=60",
    "server.stall_timeout_s=4", "weights.swap_timeout_s=4", "server.max_restarts=20", "train.max_restarts=20",
    "reward.max_restarts=20", "reward.retries=5",
)  # fmt: skip
EVENTS: Final[dict[After, int]] = {  # how many of them a run of 8 steps has at least
    "sample_done": 32,
    "scored": 32,
    "step_done": 7,
    "published": 8,
    "swapped": 8,
    "checkpoint_done": 3,
}
KILLED: Final = -9
GENERATE: Final = "/inference/v1/generate"
HANDSHAKE: Final = 4  # requests that each server is asked before its first sample
IN_A_ROW: Final = 4  # requests that a server answers with an error
LIVES: Final = 20  # controllers of one run, at most
LIFE_S: Final = 180.0
TOKEN_S: Final = 0.002
STEP_S: Final = 0.05


@dataclass(frozen=True)
class Report:
    """What became of a seed. schedule: its faults. came: how many of them did (a moment may not come, when an earlier
    fault has ended the process that it is about). wrong: in words; nothing where all went well. shortest: the part of
    the schedule that is still wrong, where it was looked for. folder: of the run, kept where something was wrong."""

    seed: int
    schedule: tuple[Fault, ...]
    came: int
    wrong: tuple[str, ...]
    seconds: float
    shortest: tuple[Fault, ...] | None = None
    folder: Path | None = None

    def __str__(self) -> str:
        head = f"seed {self.seed}: {'; '.join(map(str, self.schedule)) or 'no faults'}: "
        if not self.wrong:
            return f"{head}all well, {self.came} of them came, {self.seconds:.1f} s"
        lines = [f"{head}WRONG", *self.wrong]
        if self.shortest is not None:
            lines.append(f"the shortest that fails: tools/chaos.py run --schedule '{written(self.shortest)}'")
        return "\n".join(lines)


def chaos(
    seed: int,
    *,
    faults: int = 4,
    folder: Path,
    schedule: Sequence[Fault] | None = None,
    shortest: bool = False,
) -> Report:
    """A run with the faults of the seed (or those of `schedule`), and what is wrong with it. folder: where run folders
    are made. shortest: if something is, look for the shortest schedule for which something is, too."""
    chosen = tuple(draw(seed, faults) if schedule is None else schedule)
    begun = time.monotonic()
    played = play(chosen, folder)
    seconds = time.monotonic() - begun
    short = None
    if played.wrong and shortest:

        def fails(part: Sequence[Fault]) -> bool:
            return len(part) == len(chosen) or bool(play(part, folder).wrong)

        short = tuple(shrink(chosen, fails))
    return Report(seed, chosen, played.came, played.wrong, seconds, short, played.folder)


def draw(seed: int, faults: int) -> list[Fault]:
    """Faults of all kinds, at moments that every run of this size has, in the order of the moments' shares of it."""
    source = random.Random(f"chaos {seed}")
    return sorted((_draw_one(source) for _ in range(faults)), key=lambda f: f.count / EVENTS.get(f.after, 32))


def written(schedule: Sequence[Fault]) -> str:
    """To be pasted after --schedule."""
    return msgspec.json.encode(list(schedule)).decode()


def read(text: str) -> list[Fault]:
    """What `written` wrote. Raises msgspec.ValidationError."""
    return msgspec.json.decode(text, type=list[Fault])


def _draw_one(source: random.Random) -> Fault:
    whom = source.choice(["server 0", "server 1", "rewards 0", "trainer", "controller"])
    deeds: list[Deed] = ["kill"] if whom == "controller" else ["kill", "freeze"]
    if whom.startswith("server"):
        deeds += ["500", "break", "stall"]
    do = source.choice(deeds)
    if do in ("500", "break", "stall"):
        return Fault("request", source.randint(1, 16), do, whom)
    after = source.choice(list(EVENTS))
    return Fault(after, source.randint(1, EVENTS[after]), do, whom)


@dataclass(frozen=True)
class Played:
    """A run that met faults; as in `Report`."""

    came: int
    wrong: tuple[str, ...]
    folder: Path | None


def play(schedule: Sequence[Fault], parent: Path) -> Played:
    """A run that meets these faults, controller after controller until it ends."""
    folder = Path(tempfile.mkdtemp(prefix="c-", dir=parent))
    overrides = (f"train.ranks={WANTED.ranks}", f"rollout.max_staleness={WANTED.eta}", f"train.steps={WANTED.steps}")
    life = Life(
        config=str(write_small_run(folder, *overrides, *OPTIONS)),
        run_dir=str(folder / "run"),
        books=str(folder / "trainer.jsonl"),
        server_book=str(folder / "servers.jsonl"),
        token_s=TOKEN_S,
        step_s=STEP_S,
        faults=list(schedule),
        journal=str(folder / "journal"),
        orders=_orders(schedule),
    )
    wrong = _live(life) or _wrong(life)
    ordered = sum(fault.after == "request" for fault in schedule)  # those the servers know by themselves
    came = len(Journal(folder / "journal").done) + ordered
    if not wrong:
        shutil.rmtree(folder)
    return Played(came, tuple(wrong), folder if wrong else None)


def _live(life: Life) -> list[str]:
    """All of its controllers; what went wrong with one of them, and what they have left."""
    moments: list[Moment] = []
    wrong: list[str] = []
    run_dir = Path(life.run_dir)
    for number in range(LIVES):
        end = live(msgspec.structs.replace(life, resume=number > 0, orders=life.orders if number == 0 else {}), LIFE_S)
        wrong += [f"a process is left: {line}" for line in wait_for_the_end_of_all(end.mark)[1]]
        if end.code != KILLED:
            break
        moments.append(books.moment(run_dir, Path(life.server_book)))
    if end.code != 0:
        how = "stood still" if end.code is None else f"ended with {end.code}"
        wrong.append(f"controller {number} {how}:\n{end.said[-3000:]}")
    wrong += [f"{path} is left in shared memory" for path in books.published(run_dir) if path.exists()]
    wrong += [f"{path} is left" for path in books.sockets_left(Path(life.config).parent / "s")]
    return wrong + list(books.not_generated_again(Path(life.server_book), moments))


def _wrong(life: Life) -> list[str]:
    """Of a run that has ended."""
    assert life.journal is not None
    run_dir = Path(life.run_dir)
    lines, entries = books.read_trainer(Path(life.books)), books.read_servers(Path(life.server_book))
    return [
        *islice(Journal(Path(life.journal)).wrong, 3),
        *books.trained_once(lines, WANTED),
        *books.same_batches_again(lines),
        *books.states_follow(lines),
        *books.order_of_data(lines, entries, WANTED),
        *books.nothing_lost(run_dir, lines, WANTED),
        *books.graded_once(run_dir),
        *books.audited(run_dir),
        *books.decided_again(run_dir),
        *books.ages_by_log(run_dir, WANTED),
        *books.metrics_complete(run_dir, WANTED),
        *books.folder_tidy(run_dir, WANTED),
    ]


def _orders(schedule: Sequence[Fault]) -> dict[str, list[list[Order]]]:
    """Those of servers' first processes that come after so many requests; one request has one fault, the first."""
    what: dict[str, Callable[[], ServerFault]] = {
        "500": lambda: Status(500), "break": lambda: Break(2), "stall": lambda: Stall(2),
    }  # fmt: skip
    orders: dict[str, list[list[Order]]] = {}
    for name in ("server 0", "server 1"):
        begun = 0  # requests that are spoken for
        mine: list[Order] = []
        for fault in sorted((f for f in schedule if f.whom == name and f.after == "request"), key=lambda f: f.count):
            skip = max(HANDSHAKE + fault.count - 1 - begun, 0)
            times = 1 if fault.do == "stall" else IN_A_ROW
            mine.append(Order(GENERATE, what[fault.do](), skip, times))
            begun += skip + times
        if mine:
            orders[name.replace(" ", "-")] = [mine]
    return orders
