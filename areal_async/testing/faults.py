"""Faults at moments of a run, from inside of the controller's process: processes killed or stopped, itself killed.

What always holds: a moment is an event of the run, counted over all of its controllers, not a time; each fault comes
once, whatever dies: the journal, one write a line, is written before the deed. After every event the ledger is compared
with itself.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from areal_async import process_tree
from areal_async.controller.parts import Parts
from areal_async.core.orchestrator import Orchestrator
from areal_async.messages import AnyCommand, AnyEvent
from areal_async.rollout import vllm_http
from areal_async.wire import beats

After: TypeAlias = Literal["sample_done", "scored", "step_done", "published", "swapped", "checkpoint_done", "request"]
Deed: TypeAlias = Literal["kill", "freeze", "500", "break", "stall"]
DEADLINE_S: Final = 5.0
STATES: Final = ("trained", "filtered", "stale", "failed", "cancelled", "outstanding", "training")


class Fault(msgspec.Struct, frozen=True):
    """whom: `server 0`, `rewards 0`, `trainer`, `controller`. do: `kill` and `freeze` it (SIGKILL, SIGSTOP) after the
    count-th event of a kind; a server, also: answer 500, cut the connection, or say nothing more, from the count-th
    request for a sample on that its first process is asked."""

    after: After
    count: int
    do: Deed
    whom: str

    def __str__(self) -> str:
        return f"after {self.after} {self.count}: {self.do} {self.whom}"


class Journal:
    """What has happened, over all controllers of a run: events by kind, faults that came, what was found wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.events: Counter[str] = Counter()
        self.done: set[int] = set()
        self.wrong: list[str] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            word, _, rest = line.partition(" ")
            if word == "event":
                self.events[rest] += 1
            elif word == "fault":
                self.done.add(int(rest))
            elif word == "wrong":
                self.wrong.append(rest)

    def write(self, word: str, rest: str) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(f"{word} {rest}\n".encode())


def install(faults: Sequence[Fault], path: Path) -> None:
    """Have the faults come in this process, as far as they haven't come yet. What stands still is noticed sooner than
    in a run whose answers take longer than milliseconds."""
    vllm_http.CONTROL_DEADLINE_S = DEADLINE_S  # type: ignore[misc]
    beats.LOST_AFTER_S = DEADLINE_S  # type: ignore[misc]
    journal = Journal(path)
    seen = Parts._seen

    def watched(self: Parts, event: AnyEvent, commands: list[AnyCommand]) -> None:
        seen(self, event, commands)
        for wrong in unbalanced(self._core):
            journal.write("wrong", f"after {event}: {wrong}")
        kind = str(type(event).__struct_config__.tag)
        journal.events[kind] += 1
        journal.write("event", kind)
        for number, fault in enumerate(faults):
            if number not in journal.done and (fault.after, fault.count) == (kind, journal.events[kind]):
                journal.done.add(number)
                journal.write("fault", str(number))
                _do(fault)

    Parts._seen = watched  # type: ignore[method-assign]


def unbalanced(core: Orchestrator) -> Iterable[str]:
    """Where the ledger disagrees with itself."""
    balance: Mapping[str, int] = core.balance()
    for kind in ("", "samples_"):
        total = sum(balance[kind + state] for state in STATES)
        if balance[f"{kind}admitted"] != total:
            yield f"{kind}admitted is {balance[f'{kind}admitted']}, the states add up to {total}: {dict(balance)}"


def _do(fault: Fault) -> None:
    number = signal.SIGKILL if fault.do == "kill" else signal.SIGSTOP
    if fault.whom == "controller":
        os.kill(os.getpid(), number)
    process_tree.signal_all(_processes(fault.whom)[:1], number)


def _processes(whom: str) -> list[int]:
    """The process of a peer, then those that it forked, without the guard that looks after it; none while it is being
    started again."""
    kind, _, number = whom.partition(" ")
    is_it: Mapping[str, Callable[[list[str]], bool]] = {
        "server": lambda words: any(word.endswith(f"/server-{number}.sock") for word in words),
        "trainer": lambda words: "areal_async.testing.trainer" in words,
        "rewards": lambda words: "areal_async.rewards.worker" in words and f"rewards.{number}" in words,
    }
    return [pid for pid in process_tree.walk(os.getpid()) if _is_no_guard(pid) and is_it[kind](_words(pid))]


def _is_no_guard(pid: int) -> bool:
    return not any(word.endswith("/guard.py") for word in _words(pid))


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
