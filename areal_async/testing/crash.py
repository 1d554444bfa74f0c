"""A controller that is killed at an exact point: the n-th time that its program passes a named place.

What always holds: the program is the real one; its functions are wrapped from outside, in this process only. The kill
is SIGKILL by the process itself, so nothing is flushed, closed or told. A place is passed as often as `Life.counts`
says after a run that ended, so a seed can draw a pass from all of them alike.

As a program: `python -m areal_async.testing.crash LIFE`, the life as JSON. Exit code 0: the run ended as it should; 1:
it failed; killed: −9.
"""

import asyncio
import functools
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from areal_async import process_tree
from areal_async.config_file import load_config
from areal_async.controller import Controller
from areal_async.controller.checkpoints import MARKER
from areal_async.controller.parts import Parts
from areal_async.controller.turn import Turn
from areal_async.core.orchestrator import Orchestrator
from areal_async.errors import ArealError
from areal_async.launch.child import Child
from areal_async.log import format as fmt
from areal_async.log.writer import RunLog
from areal_async.messages import Joined, RolledBack, SaveCheckpoint, Train
from areal_async.rollout.vllm_http import VllmClient
from areal_async.testing import faults
from areal_async.testing.faults import Fault
from areal_async.testing.recipes import scripted
from areal_async.testing.trainer import TrainerOrder
from areal_async.testing.vllm_server import Order
from areal_async.wire.router import Router

PLACES: Final = {
    "record": "in the middle of a write to the decision log: a part of its bytes are there",
    "payload": "in the middle of a write to a payload segment",
    "event": "a write to the decision log ends between two records: an event without all of its commands",
    "command": "written, and before one of the turn's commands is carried out",
    "sent": "a training step was sent to a rank",
    "answered": "a rank has answered a training step; with two ranks the other one may not have",
    "swap": "after one of the calls of a swap of weights: pause, start, update, finish, resume",
    "saving": "a rank was asked for its part of a checkpoint, or has answered",
    "checkpoint": "before a file of a checkpoint is opened, renamed or removed: its data, those of older ones",
    "marker": "the data of a checkpoint are there; before its marker is written, or read or removed later",
    "segment": "before a payload segment of the log is begun, or removed because nothing needs it any more",
    "start": "a process of the run has been started",
    "joined": "a server, a reward worker or the trainer is there, and the log doesn't know it",
    "reading": "while a resume reads the log, after one of its events",
    "going back": "a resume has decided where it goes on: before and after that is written",
}
SEGMENT_BYTES: Final = 3000  # so that a run of some hundred tokens has several
SWAP_CALLS: Final = ("pause", "start_weight_update", "update_weights", "finish_weight_update", "resume")
FILE_EVENTS: Final = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "shutil.rmtree")


class Point(msgspec.Struct, frozen=True):
    """Where a controller dies. number: the pass, from 1. cut: share of the bytes that a torn write leaves."""

    place: str
    number: int
    cut: float = 0.5


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One controller process. config: file. run_dir: run folder. resume: it goes on there. point: where it dies, None
    for a life to the end. counts: file that the passes are written to at its end. books, server_book: of the peers.
    orders, trainer_orders: faults of the peers (`testing.recipes`). faults, with their journal: `testing.faults`."""

    config: str
    run_dir: str
    resume: bool = False
    point: Point | None = None
    counts: str | None = None
    books: str
    server_book: str
    token_s: float = 0.0
    step_s: float = 0.0
    orders: dict[str, list[list[Order]]] = {}
    trainer_orders: list[list[TrainerOrder]] = []
    faults: list[Fault] = []
    journal: str | None = None


class Trap:
    """Counts passes, and kills this process at one of them."""

    def __init__(self, point: Point | None) -> None:
        self.point = point
        self.counts: Counter[str] = Counter()

    def comes(self, place: str) -> bool:
        """Count a pass; whether it is the one. The caller then does what is torn, and calls `kill`."""
        self.counts[place] += 1
        return self.point is not None and (self.point.place, self.point.number) == (place, self.counts[place])

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def passes(self, place: str) -> None:
        if self.comes(place):
            self.kill()


def install(trap: Trap, run_dir: Path, *, resumed: bool) -> None:
    """Set the trap in this process. run_dir: the run folder, which need not be there yet."""
    _writes(trap)
    _turns(trap)
    _ranks(trap)
    _swaps(trap)
    _starts(trap)
    _files(trap, run_dir)
    if resumed:
        _resume(trap)


def _writes(trap: Trap) -> None:
    """`record`, `event`, `payload`."""
    write_all = fmt.write_all

    def torn(fd: int, data: bytearray) -> None:
        if not data:
            return write_all(fd, data)
        if Path(os.readlink(f"/proc/self/fd/{fd}")).name == fmt.DECISIONS_NAME:
            borders = record_borders(data)
            if trap.comes("record"):
                _write_and_die(trap, fd, data, 1 + int(_cut(trap) * (len(data) - 1)))
            if borders and trap.comes("event"):
                _write_and_die(trap, fd, data, borders[int(_cut(trap) * len(borders))])
        elif trap.comes("payload"):
            _write_and_die(trap, fd, data, 1 + int(_cut(trap) * (len(data) - 1)))
        return write_all(fd, data)

    fmt.write_all = torn


def _cut(trap: Trap) -> float:
    assert trap.point is not None
    return trap.point.cut


def _write_and_die(trap: Trap, fd: int, data: bytearray, nbytes: int) -> None:
    os.write(fd, data[:nbytes])
    trap.kill()


def record_borders(data: bytes | bytearray) -> list[int]:
    """Where records of the decision log end in what is about to be written, its own end left out."""
    offset = fmt.HEADER_BYTES if data.startswith(fmt.file_header("decisions")) else 0
    borders = []
    while offset + fmt.HEAD_BYTES <= len(data):
        head = fmt.parse_head(Path(fmt.DECISIONS_NAME), offset, bytes(data[offset : offset + fmt.HEAD_BYTES]))
        offset += fmt.HEAD_BYTES + head.nbytes
        borders.append(offset)
    return borders[:-1]


def _turns(trap: Trap) -> None:
    """`command`, `joined`."""
    _before(Parts, "_carry_out", lambda *_: trap.passes("command"))

    def joined(turn: object, event: object, *_: object) -> None:
        if isinstance(event, Joined):
            trap.passes("joined")

    _before(Turn, "take", joined)


def _ranks(trap: Trap) -> None:
    """`sent`, `answered`, `saving`. `Router.request` sends in its first step, and then waits."""
    request = Router.request

    @functools.wraps(request)
    async def watched(self: Router, name: str, message: Any, *args: Any, **options: Any) -> Any:
        if isinstance(message, Train):
            before, after = "sent", "answered"
        elif isinstance(message, SaveCheckpoint):
            before = after = "saving"
        else:
            return await request(self, name, message, *args, **options)
        asked = asyncio.ensure_future(request(self, name, message, *args, **options))
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            trap.passes(before)
            answer = await asked
        except asyncio.CancelledError:
            asked.cancel()
            raise
        trap.passes(after)
        return answer

    Router.request = watched  # type: ignore[method-assign]


def _swaps(trap: Trap) -> None:
    """`swap`."""
    for name in SWAP_CALLS:
        _after(VllmClient, name, lambda _: trap.passes("swap"))


def _starts(trap: Trap) -> None:
    """`start`."""
    start = Child.start

    async def started(spec: Any) -> Child:
        child = await start(spec)
        trap.passes("start")
        return child

    Child.start = started  # type: ignore[method-assign]


def _files(trap: Trap, run_dir: Path) -> None:
    """`checkpoint`, `marker`, `segment`: Python tells of each file that this process opens, renames or removes."""
    checkpoints, segments = str(run_dir.absolute() / "checkpoints"), str(run_dir.absolute() / "log" / "payload-")

    def seen(event: str, args: tuple[Any, ...]) -> None:
        if event not in FILE_EVENTS:
            return
        folder = _folder_named(event, args)
        paths = [os.path.join(folder, os.fsdecode(a)) for a in args[:2] if isinstance(a, str | bytes | os.PathLike)]
        if any(path.startswith(checkpoints) for path in paths):
            trap.passes("marker" if paths[0].endswith(MARKER) else "checkpoint")
        elif any(path.startswith(segments) for path in paths) and not (event == "open" and _only_reads(args)):
            trap.passes("segment")

    sys.addaudithook(seen)


def _folder_named(event: str, args: tuple[Any, ...]) -> str:
    """What a relative path is relative to: rmtree names files by the descriptor of their folder."""
    if event in ("os.remove", "os.rmdir") and args[1] != -1:
        return os.readlink(f"/proc/self/fd/{args[1]}")
    return os.getcwd()


def _only_reads(args: tuple[Any, ...]) -> bool:
    """args: of the event `open`: path, mode, flags."""
    return not int(args[2]) & (os.O_WRONLY | os.O_RDWR)


def _resume(trap: Trap) -> None:
    """`reading`, `going back`."""
    decided = told = False

    def read(_: object) -> None:
        if not decided:
            trap.passes("reading")

    def appended(log: object, record: object, *_: object) -> None:
        nonlocal decided
        if isinstance(record, RolledBack):
            decided = True
            trap.passes("going back")

    def flushed(_: object) -> None:
        nonlocal told
        if decided and not told:
            told = True
            trap.passes("going back")

    _after(Orchestrator, "handle", read)
    _before(RunLog, "append", appended)
    _after(RunLog, "flush", flushed)


def _before(owner: type, name: str, told: Callable[..., None]) -> None:
    """Have `told` called, with the same arguments, before a method."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **options: Any) -> Any:
        told(*args)
        return method(*args, **options)

    setattr(owner, name, wrapped)


def _after(owner: type, name: str, told: Callable[[object], None]) -> None:
    """Have `told` called with the object after a method, a coroutine or not, has returned."""
    method = getattr(owner, name)

    async def awaited(subject: object, answer: Awaitable[object]) -> object:
        value = await answer
        told(subject)
        return value

    @functools.wraps(method)
    def wrapped(*args: Any, **options: Any) -> Any:
        answer = method(*args, **options)
        if asyncio.iscoroutine(answer):
            return awaited(args[0], answer)
        told(args[0])
        return answer

    setattr(owner, name, wrapped)


async def _live(life: Life) -> None:
    recipes = scripted(
        token_s=life.token_s,
        step_s=life.step_s,
        books=Path(life.books),
        server_book=Path(life.server_book),
        orders=life.orders,
        trainer_orders=life.trainer_orders,
    )
    config, run_dir = load_config(life.config), Path(life.run_dir)
    config = msgspec.structs.replace(config, log=msgspec.structs.replace(config.log, segment_bytes=SEGMENT_BYTES))
    async with Controller(config, run_dir=run_dir, resume=life.resume, recipes=recipes) as run:
        await run.run()


def main() -> int:
    """Live the life that the command line describes. Raises SystemExit."""
    process_tree.die_with_parent(os.getppid())
    life = msgspec.json.decode(sys.argv[1], type=Life)
    trap = Trap(life.point)
    install(trap, Path(life.run_dir), resumed=life.resume)
    if life.journal is not None:
        faults.install(life.faults, Path(life.journal))
    try:
        uvloop.run(_live(life))
    except ArealError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        if life.counts is not None:
            Path(life.counts).write_bytes(msgspec.json.encode(dict(trap.counts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
