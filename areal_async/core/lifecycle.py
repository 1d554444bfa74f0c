"""Life cycles of groups, samples, servers, reward workers and the trainer, and the story that each live thing carries.

A thing is in exactly one state, and what may follow a state stands in its table and nowhere else. The diagrams in
docs/lifecycles.md are drawn from these tables (`tools/draw_lifecycles.py`), so they can't disagree.

Why tables: lost and doubled samples come from a transition that nobody had written down. Here an unwritten transition
can't happen; it raises `IllegalTransition` with the story of the thing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from areal_async.errors import IllegalTransition

STORY_LENGTH: Final = 20  # happenings kept of a live thing: a few attempts of a sample, a few swaps of a server

Word: TypeAlias = str | int | float | None
Happening: TypeAlias = tuple[float, str, str, tuple[Word, ...]]
"""Run clock in seconds, state after it, a text with `{}` for the words, the words (put in only when it is told)."""


@dataclass(frozen=True)
class Lifecycle:
    """name: of the kind of thing. start: its first state. table: what may follow each state. essay: why it is so."""

    name: str
    start: str
    table: Mapping[str, tuple[str, ...]]
    essay: str


class Thing:
    """Something with a life cycle. id: it has one before anything is told of it."""

    __slots__ = ("happenings", "state")
    lifecycle: ClassVar[Lifecycle]
    id: str | int

    def __init__(self, at: float, why: str = "", *words: Word) -> None:
        self.state = self.lifecycle.start
        self.happenings: list[Happening] = [(at, self.state, why, words)]

    @property
    def label(self) -> str:
        """How people call it, such as "sample 1307.5"."""
        return f"{self.lifecycle.name} {self.id}"

    def move(self, state: str, at: float, why: str = "", *words: Word) -> None:
        """Go over to `state`. Raises IllegalTransition, with the story, where the table doesn't have it."""
        self.happen((at, state, why, words))

    def happen(self, happening: Happening) -> None:
        """`move`, where several things share what is told of it."""
        state = happening[1]
        if state not in self.lifecycle.table[self.state]:
            at, state, why, words = happening
            raise IllegalTransition(
                f"{self.label} can't go from {self.state} to {state}"
                f" (at {at:.3f} s: {why.format(*words)}). This is an error of areal-async. Its story:\n{self.story()}"
            )
        self.state = state
        self._keep(happening)

    def note(self, at: float, why: str, *words: Word) -> None:
        """Something happened that left the state as it is."""
        self._keep((at, self.state, why, words))

    def _keep(self, happening: Happening) -> None:
        self.happenings.append(happening)
        if len(self.happenings) > STORY_LENGTH:
            del self.happenings[0]

    @property
    def state_since(self) -> float:
        """Run clock at which it came into its state, or the first moment of it that its story still has."""
        since = self.happenings[-1][0]
        for at, state, _, _ in reversed(self.happenings):
            if state != self.state:
                break
            since = at
        return since

    def story(self) -> str:
        """Its last happenings, a line each, the oldest first."""
        lines = [f"  {at:10.3f} s  {state:<10} {why.format(*words)}" for at, state, why, words in self.happenings]
        return "\n".join([self.label, *(line.rstrip() for line in lines)])


GROUP: Final = Lifecycle(
    "group",
    "admitted",
    {
        "admitted": ("running", "stale", "failed", "cancelled"),
        "running": ("scored", "stale", "failed", "cancelled"),
        "scored": ("ready", "filtered"),
        "ready": ("training", "stale"),
        "training": ("trained",),
        "trained": ("training",),
        "filtered": (),
        "stale": (),
        "failed": (),
        "cancelled": (),
    },
    """A group is the samples of one prompt. It is `admitted` when the staleness rule gives it a place and a server:
from then on it counts as outstanding, although its prompt has yet to be read. It is `running` while a member is being
generated or checked; `scored` when the last one has its outcome, and in the same moment `ready` to be trained or
`filtered` (it would teach nothing, or its share of right answers is not wanted). `training` begins when its batch is
formed and ends, `trained`, when the step is done. Only going back to a checkpoint leads from `trained` to `training`:
the same batch once more.

`failed`: its prompt can't be used, or too many of its samples failed. `cancelled`: the run ended, the data ended, or
training went back to a checkpoint before any of its members had an outcome; in the last case its prompt gets a new
group. `stale`: its deadline has passed and
`rollout.when_older` is `drop`, the only policy that throws anything away for its age (docs/staleness.md); with
`rollout.requeue` its prompt gets a new group. All of these give the place back at once.""",
)

SAMPLE: Final = Lifecycle(
    "sample",
    "waiting",
    {
        "waiting": ("running", "stale", "cancelled"),
        "running": ("running", "scoring", "scored", "held", "stale", "failed", "cancelled"),
        "held": ("running", "stale", "cancelled"),
        "scoring": ("scored", "stale", "cancelled"),
        "scored": ("training", "filtered", "stale", "cancelled"),
        "training": ("trained",),
        "trained": ("training",),
        "filtered": (),
        "stale": (),
        "failed": (),
        "cancelled": (),
    },
    """A sample is one answer. It is `waiting` until the prompt of its group is read, `running` while a server writes
it (a further attempt after a failure is `running` again), `scoring` while its check runs, `scored` when the outcome is
known, be it a reward or none. It is then trained with its group, or `filtered` where it has no reward, where it was
cut and `train.truncated` is `mask`, or where its group is filtered. A sample that failed in its last attempt is
`failed`; when its group fails because of it, the other members are `cancelled`. With a stale group, those that have no
fate of their own yet are `stale`.

`held`: it was `running` when training went back to a checkpoint, and another member of its group has its outcome
already, so the group is kept. It starts again from its prompt as soon as a server holds its group's floor again.""",
)

SERVER: Final = Lifecycle(
    "server",
    "starting",
    {
        "starting": ("updating", "lost", "quarantined"),
        "updating": ("serving", "starting", "lost", "quarantined"),
        "serving": ("updating", "lost", "quarantined"),
        "lost": ("starting", "lost", "quarantined"),
        "quarantined": (),
    },
    """A server that has joined is `starting`: it holds no weights of the run yet, and nothing is placed on it. Each
swap takes it through `updating` (pause, load, resume: one command to the core) to `serving`. Groups may be placed on
it while it updates: they queue, and their floor is the version that it had before. A swap that failed before anything
was loaded leads back to where it was, and is tried again.

`lost`: its process has ended, or it could not be swapped several times in a row. It holds nothing then; what ran on it
goes on elsewhere, asked by its own sessions, and it is started again after a pause that grows with each loss
(`starting`: it needs the newest weights before anything is placed on it). One that is lost while it starts again is
`lost` once more. `quarantined`: it was restarted too often, or its numbers are not the trainer's; it is left alone for
the rest of the run. When no other is left, the run ends.""",
)

REWARD_WORKER: Final = Lifecycle(
    "reward worker",
    "working",
    {
        "working": ("lost",),
        "lost": ("starting",),
        "starting": ("working", "lost"),
    },
    """A reward worker that has joined is `working`: checks are given to it. It is `lost` when its process has ended,
nothing is heard of it, or a check that it has isn't answered long after its deadline; its checks are made again by the
others, or wait. After a pause that grows with each loss it is `starting` (what is left of it is ended first), and
`working` when it has joined again; one that can't be started is `lost` once more. One that was lost too often ends the
run.""",
)

TRAINER: Final = Lifecycle(
    "trainer",
    "starting",
    {
        "starting": ("publishing", "lost", "starting"),
        "publishing": ("idle", "lost", "starting"),
        "idle": ("training", "checkpointing", "lost", "starting"),
        "training": ("publishing", "lost", "starting"),
        "checkpointing": ("idle", "lost", "starting"),
        "lost": ("starting", "lost"),
    },
    """The trainer is `starting` until all ranks have joined. Then it publishes the weights that it holds, and after
each step the new ones; once those are safe it is `idle`, and trains as soon as a batch may be formed. Where a
checkpoint is due it is `checkpointing` first: the next step waits for it, rollouts don't.

`lost`: one of its processes has ended, is stuck, or could not do what it was told; all of them are ended, and started
again after a pause that grows with each loss. Then training goes back to the newest checkpoint, and the trainer is
`starting` with it. A resumed run goes there too, from whatever state the log ends in. One that was lost too often ends
the run, as does the first loss where no checkpoints are made.""",
)
