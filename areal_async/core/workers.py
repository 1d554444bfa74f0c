"""The reward workers: which are there, their losses and restarts.

What always holds: a worker that was lost is told to start again, once, after a pause that grows; one that was lost too
often is the end of the run, whatever the others do: all run the same program on the same machine, so what ends one of
them again and again would end the others too, and each of its ends takes answers' checks with it. What is told of a
worker's earlier life, or told twice, changes nothing.

It knows nothing of a run, so that an evaluation without one keeps its workers by it too.
"""

from areal_async.core.lifecycle import REWARD_WORKER
from areal_async.core.restarts import Restarted
from areal_async.errors import IllegalTransition
from areal_async.messages import Joined, Lost, Restart


class Worker(Restarted):
    __slots__ = ()
    lifecycle = REWARD_WORKER

    def __init__(self, name: str, at: float) -> None:
        super().__init__(name, at)
        self._works_since = at


class Workers:
    """workers: all that have ever joined. wakeup: run clock from which `wake` has something to do. given_up: why there
    can be no more checks, "" while there can: the first loss, and the story of the worker that was lost too often."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._first_loss = ""
        self.workers: dict[str, Worker] = {}
        self.wakeup: float | None = None
        self.given_up = ""

    @property
    def none_works(self) -> bool:
        return all(worker.state != "working" for worker in self.workers.values())

    def join(self, event: Joined) -> None:
        worker = self.workers.get(event.id)
        if worker is None:
            self.workers[event.id] = Worker(event.id, event.at)
        elif event.at < worker.since:
            return  # told again
        elif worker.state == "starting":
            worker.work("working", event.at, "started again, restart {}", worker.restarts)
            worker.since = event.at
        elif event.at > worker.since:
            raise IllegalTransition(f"{worker.label} joined twice. Its story:\n{worker.story()}")

    def lost(self, event: Lost) -> None:
        """It is to be started again after a while, or everything ends if that was done too often."""
        worker = self.workers.get(event.id)
        if worker is None:
            raise IllegalTransition(f"an event tells of reward worker {event.id}, which never joined")
        if worker.state == "lost" or event.at < worker.since:
            return  # told again
        worker.forgive(event.at)
        worker.end(event.why)
        self._first_loss = self._first_loss or f"{worker.label} at {event.at:.1f} s: {event.why}"
        if worker.restarts >= self._max_restarts:
            worker.move("lost", event.at, "after {} restarts: {}", worker.restarts, event.why)
            self.given_up = (
                f"{worker.label} was lost once more after {worker.restarts} restarts (reward.max_restarts). The first "
                f"loss of a reward worker: {self._first_loss}\nThe last one: {worker.story()}"
            )
        else:
            worker.wait_for_restart(event.at)
        self._refresh()

    def resume(self, max_restarts: int) -> None:
        """None of before is there any more."""
        self._max_restarts = max_restarts
        self._first_loss = self.given_up = ""
        self.workers.clear()
        self._refresh()

    def wake(self, at: float) -> list[Restart]:
        """Lost workers whose pause is over are started again."""
        if self.wakeup is None or at < self.wakeup:
            return []
        commands = []
        for worker in self.workers.values():
            if worker.start_again(at):
                worker.move("starting", at, "told to start again")
                commands.append(Restart(peer="rewards", id=worker.id, why=worker.why))
        self._refresh()
        return commands

    def _refresh(self) -> None:
        times = [worker.restart_at for worker in self.workers.values() if worker.restart_at is not None]
        self.wakeup = min(times, default=None)
