"""What a session refuses to send, and what it asks for."""

from typing import cast

import numpy as np
import pytest

from areal_async.errors import ServerError
from areal_async.rollout.session import Session, sample_seed
from areal_async.rollout.types import Completion, Sampling
from areal_async.rollout.vllm_http import VllmClient


class Recorder:
    """In the place of a client: notes what is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Sampling, str]] = []

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, deadline_s: float
    ) -> Completion:
        self.asked.append((token_ids, sampling, request_id))
        one = np.ones(1, np.int32)
        return Completion(one, np.zeros(1, np.float32), one, "stop")


def session_on(recorder: Recorder) -> Session:
    return Session(
        cast(VllmClient, recorder),
        sample="3.1",
        attempt=2,
        run_seed=5,
        sampling=Sampling(temperature=1.0, max_tokens=2048, stop_token_ids=(0,)),
        context=4096,
        vocab_size=100,
        deadline_s=1.0,
    )


async def test_the_answer_is_limited_to_what_fits() -> None:
    """P21: a prompt of 2,089 tokens and max_tokens 2,048 in a context of 4,096."""
    recorder = Recorder()
    await session_on(recorder).generate([1] * 2089)
    assert recorder.asked[0][1].max_tokens == 2007


@pytest.mark.parametrize(
    ("prompt", "why"),
    [([1] * 44249, "does not fit the context"), ([], "does not fit"), ([100], r"\[0, 100\)"), ([-1], r"\[0, 100\)")],
)
async def test_a_prompt_that_cannot_be_answered_is_not_sent(prompt: list[int], why: str) -> None:
    recorder = Recorder()
    with pytest.raises(ServerError, match=why):
        await session_on(recorder).generate(prompt)
    assert not recorder.asked


async def test_each_request_has_an_id_and_a_seed_of_its_own() -> None:
    recorder = Recorder()
    session = session_on(recorder)
    await session.generate([1])
    await session.generate([1])
    assert [asked[2] for asked in recorder.asked] == ["3.1-2-0", "3.1-2-1"]
    seeds = [asked[1].seed for asked in recorder.asked]
    assert seeds == [sample_seed(5, "3.1", 2, 0), sample_seed(5, "3.1", 2, 1)]
    assert seeds[0] != seeds[1]
