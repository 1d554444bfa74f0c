"""A sample's conversation with the server that it was placed on.

What always holds: token ids in and out; every sampled token has a log-probability and the version that sampled it;
a request asks for no more tokens than the context has room for; a session outlives weight swaps, since the server
goes on with its requests under the new weights.
"""

import zlib

import msgspec

from areal_async.errors import ServerError
from areal_async.messages import SampleId
from areal_async.rollout.types import Completion, Sampling
from areal_async.rollout.vllm_http import VllmClient

SEED_BITS = 0x7FFF_FFFF  # vLLM takes a signed 64-bit seed; 31 bits are safe in every client


def sample_seed(run_seed: int, sample: SampleId, attempt: int, turn: int) -> int:
    """Seed of one request: the same run gives the same, whatever the order in which requests are sent."""
    return zlib.crc32(f"{run_seed}/{sample}/{attempt}/{turn}".encode()) & SEED_BITS


class Session:
    """What a workflow generates with.

    sampling: the run's; `generate` may lower `max_tokens` (and a workflow may pass its own). context: the model's, in
    tokens. vocab_size: entries of its output layer. deadline_s: of the whole attempt, enforced by whoever runs the
    workflow.
    """

    def __init__(
        self,
        client: VllmClient,
        *,
        sample: SampleId,
        attempt: int,
        run_seed: int,
        sampling: Sampling,
        context: int,
        vocab_size: int,
        deadline_s: float,
    ) -> None:
        self.sample = sample
        self.attempt = attempt
        self.sampling = sampling
        self._client = client
        self._run_seed = run_seed
        self._context = context
        self._vocab_size = vocab_size
        self._deadline_s = deadline_s
        self._turn = 0

    async def generate(self, token_ids: list[int], sampling: Sampling | None = None) -> Completion:
        """Have the model go on after `token_ids` (1 to context − 1 of them).

        Errors: ServerError where the prompt leaves no room, or the server failed; the attempt has then failed.
        """
        chosen = self.sampling if sampling is None else sampling
        room = self._context - len(token_ids)
        if room < 1 or not token_ids:
            raise ServerError(
                f"sample {self.sample}: a prompt of {len(token_ids)} tokens does not fit the context of "
                f"{self._context}; it was not sent"
            )
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:  # such an id would end the server
            raise ServerError(
                f"sample {self.sample}: token ids must lie in [0, {self._vocab_size}), those of the prompt are "
                f"{min(token_ids)} to {max(token_ids)}; it was not sent"
            )
        turn = self._turn
        self._turn += 1
        chosen = msgspec.structs.replace(
            chosen,
            max_tokens=min(chosen.max_tokens, room),
            seed=sample_seed(self._run_seed, self.sample, self.attempt, turn),
        )
        return await self._client.generate(
            token_ids,
            chosen,
            request_id=f"{self.sample}-{self.attempt}-{turn}",
            deadline_s=self._deadline_s,
        )
