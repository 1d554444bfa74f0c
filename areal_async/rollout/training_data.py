"""The training problems of a run: the files of `data.train`, without prompts that may not be asked, in their order.

What always holds: which rows are left out is decided before the run begins, from the files, the tokenizer and the
limit alone, so every position of the order has a prompt that fits. Only prompts that might be too long are tokenized
for that: a token is at least one byte of text, so most are known to fit by their size.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from areal_async.config import Config
from areal_async.errors import DataError
from areal_async.rollout.data import Dataset
from areal_async.rollout.order import Positions
from areal_async.rollout.text import Text

if TYPE_CHECKING:  # it loads numpy, which `areal-async check` does without
    from areal_async.rollout.workflow import Prompt

logger = logging.getLogger("areal_async")

TOGETHER: Final = 512  # prompts tokenized at a time: enough for all cores, little enough for the memory
TELL_S: Final = 10.0  # how often a long tokenization says how far it is


@dataclass(frozen=True)
class TrainingData:
    """limit: the longest prompt that is asked, tokens. cut: longer ones are asked by their end. left_out: rows that
    are longer and aren't asked (`long_prompts: skip`)."""

    dataset: Dataset
    text: Text
    positions: Positions
    limit: int
    cut: bool
    left_out: int

    def fitted(self, prompt: "Prompt") -> "Prompt":
        """The prompt, cut where it is too long and that is asked for. Errors: DataError where it may not be cut."""
        if len(prompt.token_ids) <= self.limit:
            return prompt
        if not self.cut:  # a template that writes more than `Text.most_tokens` knows of
            tokens = len(prompt.token_ids)
            raise DataError(f"{self.dataset.where(prompt.row)}: {tokens} tokens, and {self.limit} are the most")
        token_ids = self.text.cut(prompt.token_ids, self.limit)
        return replace(prompt, token_ids=token_ids, text=self.text.decode_all(token_ids))

    def left_out_in_words(self) -> str:
        return (
            f"{self.left_out} of {len(self.dataset)} prompts are longer than {self.limit} tokens and left out "
            f"(data.long_prompts: skip)"
        )


def load(config: Config, text: Text, context: int) -> TrainingData:
    """Read the files; context: the servers', in tokens.

    Errors: DataError: a line for each wrong row; prompts longer than the limit under `long_prompts: error`; nothing
    left under `skip`.
    """
    data = config.data
    dataset = Dataset.load_all(data.train, data.prompt_key, data.answer_key)
    limit = prompt_limit(config, context)
    long = {} if data.long_prompts == "cut" else long_prompts(dataset, text, limit)
    if long and data.long_prompts == "error":
        raise DataError(f"data.long_prompts: error: {told(dataset, long, limit)}")
    files = [[row for row in file if row not in long] if long else file for file in dataset.files]
    for path, rows in zip(dataset.paths, files, strict=True):
        if not rows and (data.weights or not any(files)):
            raise DataError(f"{path}: every prompt is longer than {limit} tokens, so nothing of it is left to train on")
    positions = Positions(files, data.weights, config.seed, data.shuffle, data.epochs)
    return TrainingData(dataset, text, positions, limit, data.long_prompts == "cut", len(long))


def prompt_limit(config: Config, context: int) -> int:
    """The longest training prompt, tokens: `data.max_prompt_tokens`, and never more than leaves room for one token."""
    return min(config.data.max_prompt_tokens or context - 1, context - 1)


def long_prompts(dataset: Dataset, text: Text, limit: int, at_most: int | None = None) -> dict[int, int]:
    """Rows whose prompt has more than `limit` tokens -> its tokens. at_most: tokenize only so many, the longest in
    bytes (none: all that might be too long). Errors: as `tokenized`."""
    size = {number: text.most_tokens(row.prompt) for number, row in enumerate(dataset.rows)}
    doubtful = [number for number, most in size.items() if most > limit]
    if at_most is not None and len(doubtful) > at_most:
        doubtful = sorted(sorted(doubtful, key=size.__getitem__, reverse=True)[:at_most])
    return {row: len(ids) for row, ids in tokenized(dataset, text, doubtful) if len(ids) > limit}


def told(dataset: Dataset, long: dict[int, int], limit: int) -> str:
    """`3 of 10 prompts have more than 64 tokens, first a.jsonl:2 (70), …`."""
    first = ", ".join(f"{dataset.where(row)} ({tokens})" for row, tokens in list(long.items())[:3])
    count = f"{len(long)} of {len(dataset)} prompts have" if len(long) > 1 else f"1 of {len(dataset)} prompts has"
    return f"{count} more than {limit} tokens, first {first}"


def tokenized(dataset: Dataset, text: Text, rows: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Each of these rows with the token ids of its prompt, tokenized on all cores.

    Errors: DataError with file and line for a prompt that can't be rendered or has a token that the model hasn't.
    """
    begun = told_at = time.monotonic()
    for first in range(0, len(rows), TOGETHER):
        part = rows[first : first + TOGETHER]
        for row, ids in zip(part, _encode(dataset, text, part), strict=True):
            if max(ids) >= text.vocab_size:
                what = f"token {max(ids)} of the prompt is outside the model's vocabulary ({text.vocab_size})"
                raise DataError(f"{dataset.where(row)}: {what}; model.path holds another model's tokenizer")
            yield row, ids
        if time.monotonic() - told_at > TELL_S:
            told_at = time.monotonic()
            done = first + len(part)
            logger.info("measuring prompts: %d of %d after %.0f s", done, len(rows), told_at - begun)


def _encode(dataset: Dataset, text: Text, rows: Sequence[int]) -> list[list[int]]:
    try:
        return text.encode_all([dataset.rows[row].prompt for row in rows])
    except DataError:
        for row in rows:  # once more, one by one, to name the line
            try:
                text.encode(dataset.rows[row].prompt)
            except DataError as error:
                raise DataError(f"{dataset.where(row)}: {error}") from error
        raise
