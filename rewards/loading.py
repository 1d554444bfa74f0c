"""From the configuration's `reward.function` to a grader: `exact`, or the user's own `module:function`.

A function is called with keyword arguments, those of its parameters that there are: `prompt`, `response`, `answer`,
`finish`, and the data row's other columns by their names (all of them if it takes `**columns`). It returns a number, or
True or False; it may be `async`. docs/rewards.md shows it beside TRL's and verl's.

What always holds: what can be known before an answer is there is a `RewardError` of `load`, which says what is wrong,
where it looked, and what to do. Nothing here needs ZeroMQ, torch or a tokenizer.
"""

import difflib
import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final, cast

from areal_async.errors import RewardError
from areal_async.messages import RewardSpec
from areal_async.rewards.verdicts import Check, Grader, Outcome, given

BUILTIN: Final = {
    name: f"areal_async.rewards.{name}"
    for name in ("exact", "numeric", "regex", "choice", "math", "code", "reasoning_gym")
}
"""Each module has `grader(spec) -> Grader`; loaded when it is named, since some load much."""

OWN_NAMES: Final = ("prompt", "response", "answer", "finish")
SIGNATURE: Final = "reward(prompt, response, answer, **columns) -> float | bool"


def load(spec: RewardSpec) -> Grader:
    """The grader that `spec.function` names; RewardError if it can't be used. Puts `import_paths` on `sys.path`."""
    if spec.function in BUILTIN:
        return cast("Grader", importlib.import_module(BUILTIN[spec.function]).grader(spec))
    module, colon, name = spec.function.partition(":")
    if not (module and colon and name):
        known = ", ".join(BUILTIN)
        raise RewardError(
            f"{spec.function!r} is no reward; write one of {known}, or `module:function`, one of your own"
        )
    for path in reversed(spec.import_paths):
        if path not in sys.path:
            sys.path.insert(0, path)
    found = _attribute(_module(module, spec), name, spec)
    if not callable(found):
        raise RewardError(f"{spec.function!r} is {type(found).__name__}, not a function; write {SIGNATURE}")
    return _FunctionGrader.of(cast("Callable[..., object]", found), spec.function)


def _module(name: str, spec: RewardSpec) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            places = ", ".join(spec.import_paths) or "the working directory and Python's own paths"
            raise RewardError(
                f"{spec.function!r}: there is no module {error.name!r} in {places}; "
                "put its file beside the configuration, or install it into this environment"
            ) from None
        raise RewardError(f"{spec.function!r}: importing {name} failed:\n{traceback.format_exc()}") from error
    except (Exception, SystemExit) as error:
        raise RewardError(f"{spec.function!r}: importing {name} failed:\n{traceback.format_exc()}") from error


def _attribute(module: object, name: str, spec: RewardSpec) -> object:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [known for known in vars(found) if not known.startswith("_")], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            place = getattr(module, "__file__", None) or spec.function
            raise RewardError(f"{spec.function!r}: {os.fspath(place)} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


@dataclass(frozen=True)
class _FunctionGrader:
    """accepted: parameters that can be given by name; None: any. required: those without a default."""

    function: Callable[..., object]
    name: str
    accepted: frozenset[str] | None
    required: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., object], name: str) -> "_FunctionGrader":
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise RewardError(f"{name!r}: its parameters can't be read ({error}); wrap it: {SIGNATURE}") from None
        listed = ", ".join(map(str, parameters))
        nameless = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if nameless:
            raise RewardError(f"{name!r} takes ({listed}); {nameless[0]!r} can't be given by name: {SIGNATURE}")
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if not anything and "response" not in {p.name for p in by_name}:
            raise RewardError(
                f"{name!r} takes ({listed}), so it never sees the answer; it needs `response`: {SIGNATURE}"
            )
        return cls(
            function,
            name,
            None if anything else frozenset(p.name for p in by_name),
            tuple(p.name for p in by_name if p.default is p.empty),
        )

    def __call__(self, check: Check) -> Outcome:
        own = {name: getattr(check, name) for name in OWN_NAMES}
        arguments = {
            name: value
            for name, value in {**check.columns, **own}.items()
            if self.accepted is None or name in self.accepted
        }
        missing = [name for name in self.required if name not in arguments]
        if missing:
            return Outcome(
                "bad_data",
                f"{self.name} needs {', '.join(missing)}; the data row has: {', '.join(check.columns) or 'nothing'}",
            )
        value = self.function(**arguments)
        if inspect.isawaitable(value):
            import asyncio  # 30 ms that most rewards don't need

            value = asyncio.run(cast("Coroutine[object, object, object]", _result_of(value)))
        return _judge(value, self.name)


async def _result_of(awaitable: object) -> object:
    return await cast("Coroutine[object, object, object]", awaitable)


def _judge(value: object, name: str) -> Outcome:
    if type(value).__name__ in ("bool", "bool_"):  # also numpy's
        return Outcome("right" if value else "wrong", f"{name} returned {value}")
    if not hasattr(value, "__float__"):
        return Outcome("crash", f"{name} returned {value!r:.200}, which is not a number")
    number = float(value)
    return given(number, "" if math.isfinite(number) else f"{name} returned it")
