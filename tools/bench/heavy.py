"""Work with very different lengths, the same in every run: how long a sample's answer is follows from its name.

Log-normal, as answers of reasoning models are: the median is 48 tokens, one in a hundred has more than 700. The model
is the quickstart's with room for 1,088 tokens; its answers are nonsense of the right length, and so are the rewards,
but generating and training them costs what it costs.
"""

import json
import math
import shutil
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Final

import msgspec

from areal_async.rollout.session import Session
from areal_async.rollout.workflow import Prompt, Sample

MEDIAN_TOKENS: Final = 48
SPREAD: Final = 1.15  # of the logarithm
SHORTEST, LONGEST = 8, 1024
CONTEXT: Final = 1088


def length(sample: str) -> int:
    """Tokens of the answer of the sample with this name ("17.3")."""
    share = min(max(Random(f"length/{sample}").random(), 1e-9), 1 - 1e-9)
    drawn = MEDIAN_TOKENS * math.exp(SPREAD * NormalDist().inv_cdf(share))
    return round(min(max(drawn, SHORTEST), LONGEST))


def reward(sample: str) -> float:
    return float(Random(f"reward/{sample}").random() < 0.5)


class HeavyTail:
    """A workflow: one answer of the drawn length, with the drawn reward."""

    async def run(self, session: Session, prompt: Prompt) -> Sample:
        sampling = msgspec.structs.replace(session.sampling, max_tokens=length(session.sample), stop_token_ids=())
        completion = await session.generate(prompt.token_ids, sampling)
        return Sample.single(prompt.token_ids, completion, reward=reward(session.sample))


def model(source: Path, folder: Path) -> Path:
    """A copy of the model in `source` with a longer context."""
    shutil.copytree(source, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))
    return folder
