"""Rewards: their options (sections of the configuration), and what a reward worker is started with.

What always holds: an option has its meaning, its limits and its default here and nowhere else; the configuration's
section `reward` and a worker's specification both are `RewardOptions` with a little more.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Layer: TypeAlias = Literal["bubblewrap", "rlimits"]

Positive: TypeAlias = Annotated[int, Meta(ge=1)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A level of the options of rewards."""


class RewardTable(Options, frozen=True, kw_only=True):
    """The one table from verdicts to rewards. `given` isn't in it (the number itself), nor are `bad_data` and
    `infrastructure`, which never give a number."""

    right: Annotated[float, Meta(description="Reward of a right answer.")] = 1.0
    wrong: Annotated[float, Meta(description="Reward of a wrong answer.")] = 0.0
    no_answer: Annotated[float, Meta(description="Reward where nothing to compare was found in the response.")] = 0.0
    timeout: Annotated[float, Meta(description="Reward where the check was not done at its deadline.")] = 0.0
    crash: Annotated[float, Meta(description="Reward where the check broke, or went over a limit.")] = 0.0


class Limits(Options, frozen=True, kw_only=True):
    """What a check may use, with all that it started; over it, it is killed: `crash`."""

    memory_mib: Annotated[Positive, Meta(description="Memory of one check with all it started, MiB.")] = 2048
    processes: Annotated[Positive, Meta(description="Processes and threads that one check may have at a time.")] = 64
    open_files: Annotated[int, Meta(ge=16, description="Open files of one process.")] = 256
    file_mib: Annotated[Positive, Meta(description="Size of one file that is written, MiB.")] = 64
    output_kib: Annotated[Positive, Meta(description="What a check may print, KiB.")] = 1024


class MathOptions(Options, frozen=True, kw_only=True):
    """Of the reward `math`."""

    last_number: Annotated[
        bool,
        Meta(
            description="Where there is neither a box nor `####`: take the last line if it is an answer and no prose "
            "(`x = 5`), else the last number. Without it only a whole response that is nothing but an answer counts."
        ),
    ] = False
    thinking: Annotated[
        Literal["auto", "required", "off"],
        Meta(
            description="auto: the answer comes after the last `</think>`; where a `<think>` (also one that the prompt "
            "ends with) has no end, there is none; without tags it comes anywhere. required: without `</think>` there "
            "is no answer. off: tags are text."
        ),
    ] = "auto"
    bare_percent: Annotated[
        bool, Meta(description="A bare 28 and 28 % are the same answer (0.28 and 28 % always are).")
    ] = True
    rounding_digits: Annotated[
        Positive | None,
        Meta(
            description="A decimal of at least so many digits after the point is right where the exact value rounds to "
            "it (0.333333 for 1/3); null: only what is exactly equal is right."
        ),
    ] = 6


class CodeOptions(Options, frozen=True, kw_only=True):
    """Of the reward `code`."""

    test_timeout_s: Annotated[float, Meta(gt=0, description="Deadline of one test, seconds.")] = 6.0
    credit: Annotated[
        Literal["all", "share"],
        Meta(description="all: right if every test passes. share: the share of tests that pass (verdict `given`)."),
    ] = "all"
    bool_is_int: Annotated[
        bool, Meta(description="Call-based tests: True is the same result as 1, and False as 0.")
    ] = False


class NumericOptions(Options, frozen=True, kw_only=True):
    """Of the reward `numeric`."""

    relative: Annotated[float, Meta(ge=0, description="Tolerance as a share of the right answer.")] = 1e-6
    absolute: Annotated[float, Meta(ge=0, description="Tolerance in the answer's own unit.")] = 0.0


class RegexOptions(Options, frozen=True, kw_only=True):
    """Of the reward `regex`."""

    pattern: Annotated[
        str | None,
        Meta(
            description="Python regular expression. With a group: its last match's group is compared with the answer. "
            "Without: a response that it matches somewhere is right (a format reward)."
        ),
    ] = None


class HttpOptions(Options, frozen=True, kw_only=True):
    """Of the reward `http`."""

    url: Annotated[
        Annotated[str, Meta(pattern=r"^https?://\S+$")] | None,
        Meta(description="Where answers are sent by POST (docs/rewards.md has the form)."),
    ] = None
    connections: Annotated[Positive, Meta(description="Requests at a time, per reward worker.")] = 32
    retries: Annotated[
        int,
        Meta(
            ge=0,
            description="Further tries where that is safe: no connection, or an answer of 429, 502, 503 or 504, which "
            "say that nothing was done.",
        ),
    ] = 3
    token_env: Annotated[
        str | None,
        Meta(description="Environment variable with a bearer token, so that it stands in no file."),
    ] = None


class RewardOptions(Options, frozen=True, kw_only=True):
    """What a reward worker needs to know of the configuration."""

    function: Annotated[
        str,
        Meta(
            description="exact, numeric, regex, choice, math, code, reasoning_gym, http, or a function by import path "
            "`module:function`, sync or async; or a weighted sum of several, such as `0.9*math + 0.1*my_rewards:tidy`."
        ),
    ] = "exact"
    exact_after: Annotated[
        str | None,
        Meta(
            description="For `exact`, `numeric`, `choice` and `reasoning_gym`: judge only what follows the last "
            "occurrence of this text."
        ),
    ] = None
    concurrent: Annotated[Positive, Meta(description="Checks that one worker runs at the same time.")] = 4
    timeout_s: Annotated[
        float, Meta(gt=0, description="Deadline of a check; then it is killed, with all it started.")
    ] = 10.0
    sandbox: Annotated[
        Layer,
        Meta(
            description="What holds model-written code (`code`): bubblewrap, or knowingly without it. rlimits alone "
            "protects from accidents, not from an attacker: such code has the user's files and network."
        ),
    ] = "bubblewrap"
    values: RewardTable = RewardTable()
    limits: Limits = Limits()
    math: MathOptions = MathOptions()
    code: CodeOptions = CodeOptions()
    numeric: NumericOptions = NumericOptions()
    regex: RegexOptions = RegexOptions()
    http: HttpOptions = HttpOptions()


class RewardSpec(RewardOptions, frozen=True, kw_only=True):
    """What a reward worker is started with (a JSON file; the secret comes by the environment).

    model_path: of the tokenizer that decodes the answers; "": every task brings its response as text. import_paths:
    folders put before `sys.path` for the user's own functions.
    """

    model_path: str = ""
    import_paths: tuple[str, ...] = ()
