"""What the world knows of checkpoints, and of what they and going back ask of the core.

What always holds: made from commands and events alone, like the other books of `world`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from areal_async.messages import Checkpoint, Rules

from .servers import Book

BACK: dict[str, object] = {"checkpoint_steps": 1, "checkpoint_keep": 1000, "max_trainer_restarts": 1000}
"""Rules by which training may go back to any version, as often as a test wants."""


@dataclass
class TrainerBook(Book):
    """furthest: the latest version at a loss; only beyond it losses are forgotten."""

    furthest: int = 0

    def lose_at(self, at: float, version: int) -> None:
        if version <= self.furthest:
            self.works_since = None
        self.furthest = max(version, self.furthest)
        self.lose(at)


@dataclass
class CheckpointBook:
    """kept: versions of complete checkpoints of the surviving history. first: where the run began. oldest: the first
    step that may be trained again. last_at: when there last was one, or could first have been. steps: the step that
    trains each group that was handed over."""

    rules: Rules
    hold: Callable[[bool, str], None]
    first: int = 0
    oldest: int = 0
    kept: list[int] = field(default_factory=list)
    last_at: float = 0.0
    tried: int | None = None
    released: set[str] = field(default_factory=set)

    @property
    def on(self) -> bool:
        return self.rules.checkpoint_steps > 0 or self.rules.checkpoint_s > 0

    @property
    def points(self) -> list[int]:
        """Where training can go back to, the oldest first."""
        return sorted({version for version in (self.first, *self.kept) if version >= self.oldest})

    def is_due(self, version: int, at: float, *, stops: bool = False) -> bool:
        """Whether a checkpoint of this version has to be written once it is published."""
        before = max(self.points, default=self.first)
        if not self.on or version == self.rules.steps or version == before or version == self.tried:
            return False
        every, seconds = self.rules.checkpoint_steps, self.rules.checkpoint_s
        return stops or bool(every and version >= before + every) or bool(seconds and at >= self.last_at + seconds)

    def begin(self, command: Checkpoint, branch: int, version: int) -> None:
        self.hold((command.branch, command.version) == (branch, version), f"{command}, the trainer has {version}")
        others = sorted(self.kept)[::-1][: self.rules.checkpoint_keep - 1][::-1]
        self.hold(list(command.keep) == others, f"{command}, but {others} should be kept")
        self.tried = version

    def done(self, command: Checkpoint, at: float) -> None:
        self.kept = [*command.keep, command.version]
        self.last_at = at
        self.oldest = min(self.kept)

    def trained(self, version: int) -> None:
        if not self.on:
            self.oldest = version

    def go_back(self, to: int) -> None:
        self.kept = [version for version in self.kept if version <= to]
        self.tried = None

    def release(self, names: Iterable[str], needed: Callable[[str], bool]) -> None:
        for name in names:
            self.hold(name not in self.released, f"{name} is released twice")
            self.hold(not needed(name), f"{name} is released, and may be asked for")
            self.released.add(name)
