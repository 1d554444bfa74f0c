"""Small clusters whose times can be computed by hand."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from zlib import crc32

from areal_async.messages import Rules
from areal_async.simulate.models import Answer, Cluster, RewardModel, ServerModel, SwapModel, TrainerModel

FREE = ServerModel(0.0, 0.0, 0.0, 0.0, 0.0, max_running=1000, cache=10**9)
STEADY = replace(FREE, overhead_s=0.01)  # a step takes as long whatever runs


@dataclass(frozen=True)
class Told:
    """Answers by a function of group and member."""

    length: Callable[[int, int], int]
    prompt: int = 0
    reward: Callable[[int, int], float | None] = lambda group, member: float(member % 2)

    def answer(self, group: int, member: int, attempt: int) -> Answer:
        return Answer(self.prompt, self.length(group, member), False, self.reward(group, member))


def scattered(group: int, member: int) -> int:
    """A length from 1 to 400."""
    return 1 + crc32(f"{group}.{member}".encode()) % 400


def rules(**changes: object) -> Rules:
    base = Rules(
        seed=1,
        steps=6,
        batch_groups=4,
        group_size=2,
        max_staleness=2,
        max_concurrent=64,
        minibatches=1,
        ranks=1,
        max_tokens_per_microbatch=10_000,
        max_new_tokens=1000,
    )
    return Rules(**{name: changes.get(name, getattr(base, name)) for name in base.__struct_fields__})


def cluster(**changes: object) -> Cluster:
    base = Cluster(
        servers=2,
        server=STEADY,
        swap=SwapModel(0.0),
        trainer=TrainerModel(0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        rewards=RewardModel(0.0, 1),
        answers=Told(scattered),
    )
    return replace(base, **changes)  # type: ignore[arg-type]
