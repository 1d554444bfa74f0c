"""The books of a `World` on groups and samples: what it is told becomes what it must believe.

What always holds: they are made from events alone, never from the core's state.
"""

from dataclasses import dataclass, field

from areal_async.messages import (
    AnyEvent,
    Checkpoint,
    CheckpointDone,
    DataEnded,
    EvaluationDone,
    Failed,
    Joined,
    Lost,
    Published,
    SampleDone,
    Scored,
    StepDone,
    Swapped,
    group_of,
)

from . import expected
from .servers import Book, ServerBook


@dataclass
class GroupBook:
    """What the world has seen of a group. outcomes: of members: a reward, None (no reward), or "failed". ready: the
    step that came next when it got ready."""

    position: int
    outcomes: dict[int, float | str | None] = field(default_factory=dict)
    fate: str = "open"
    floor: int | None = None
    ready: int = 0


class Notes:
    """The part of a `World` that writes."""

    def _note(self, event: AnyEvent) -> None:
        """The books' own view of an answer."""
        match event:
            case DataEnded(group=group):
                self._settle_fate(group, "cancelled")
            case Failed(of="group", id=name):
                self._settle_fate(int(name), "failed")
            case SampleDone(sample=sample, reward=reward):
                self.came.add(sample)
                if event.prompt_tokens + event.length > self.rules.max_tokens_per_microbatch:
                    self._attempt_failed(sample)
                    return
                self.done[sample] = event
                self._kept.add(sample)
                if reward is not None:
                    self._outcome(sample, expected.usable(self.rules, reward, event))
            case Scored(sample=sample, reward=reward):
                self._outcome(sample, expected.usable(self.rules, reward, self.done[sample]))
            case Failed(of="sample", id=sample):
                self._attempt_failed(sample)
            case StepDone(step=step):
                self.trained += 1
                self.checkpoints.trained(self.trained)
                self._left += self.formed[step].groups
            case CheckpointDone(version=version):
                others = self.checkpoints.kept[-(self.rules.checkpoint_keep - 1) :]
                keep = tuple(others) if self.rules.checkpoint_keep > 1 else ()
                self.checkpoints.done(Checkpoint(version=version, branch=self.branch, keep=keep), event.at)
            case Lost(peer="trainer") | Failed(of="train" | "publish"):
                self.trainer.lose_at(event.at, self.trained)
                self.published = None  # it went with its processes
            case Joined(peer="trainer"):
                self.trainer.works_since = self.checkpoints.last_at = event.at
            case Published(version=version, branch=branch) if branch == self.branch:
                self.published = (branch, version)
                self._due = self.checkpoints.is_due(version, event.at, stops=self.stopping)
            case Swapped(server=server, version=version, branch=branch):
                self.servers[server].swap(branch, version, event.at)
            case Failed(of="swap", id=server):
                self.servers[server].failed_swaps += 1
                if self.servers[server].failed_swaps == 3:
                    self.servers[server].lose(event.at)
            case Lost(id=name):
                self.peers[name].lose(event.at)
            case Joined(peer="rewards", id=name):
                self.workers.setdefault(name, Book(self.rules.max_worker_restarts)).works_since = event.at
            case Joined(peer="server", id=name):
                self.servers.setdefault(name, ServerBook(self.rules.max_restarts))
            case EvaluationDone(version=version):
                self.evaluations.done(version)
            case Failed(of="evaluation"):
                self.evaluations.failed()

    def _attempt_failed(self, sample: str) -> None:
        self.failures[sample] += 1
        if self.failures[sample] > self.rules.retries:
            self._outcome(sample, "failed")

    def _outcome(self, sample: str, outcome: float | str | None) -> None:
        book = self.groups[group_of(sample)]
        book.outcomes[int(sample.partition(".")[2])] = outcome
        fate = expected.fate(self.rules, book.outcomes, self._answers(group_of(sample)))
        if fate != "open":
            self._settle_fate(group_of(sample), fate)
