"""Names and small types that every message uses: ids, versions, verdicts."""

from typing import Final, Literal, TypeAlias

GroupId: TypeAlias = int
"""Running number of a group in the order of admission, from 0; never used twice in a run."""
SampleId: TypeAlias = str
"""`"<group>.<member>"`, such as `"1307.5"`."""
Version: TypeAlias = int
"""How many training steps the weights have seen; 0 is the model that the run started from."""

FinishReason: TypeAlias = Literal["stop", "length"]
"""Why an answer ended: by a stop token (end of sequence), or cut at the token limit."""
Verdict: TypeAlias = Literal["right", "wrong", "no_answer", "bad_data", "timeout", "crash", "infrastructure", "given"]
"""Outcome of a check; `given`: the reward function or the workflow returned a number of its own."""
PeerKind: TypeAlias = Literal["server", "trainer", "rewards"]

PROTOCOL: Final = 1  # grows when a struct below changes in a way that an older peer can't read


def sample_id(group: GroupId, member: int) -> SampleId:
    return f"{group}.{member}"


def group_of(sample: SampleId) -> GroupId:
    return int(sample.partition(".")[0])
