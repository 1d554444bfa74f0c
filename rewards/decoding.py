"""From token ids to text, with the model's tokenizer: for the checks, and for what the worker itself sends by HTTP.

What always holds: special tokens are left out, so a reward sees what a reader would.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from areal_async.errors import RewardError

Decode: TypeAlias = Callable[[list[int]], str]


def load_decoder(model_path: str) -> Decode:
    """The decoder of the model in this folder; "": every answer comes as text. RewardError: no usable tokenizer."""
    if not model_path:
        return _nothing_to_decode
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads don't survive a fork
    from tokenizers import Tokenizer

    path = Path(model_path, "tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise RewardError(
            f"{path}: can't load the tokenizer ({error}); the model's folder needs a tokenizer.json, "
            "as `save_pretrained` of a fast tokenizer writes it"
        ) from None

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return decode


def _nothing_to_decode(token_ids: list[int]) -> str:
    raise RewardError(f"{len(token_ids)} tokens to be checked, and this worker was started without a tokenizer")
