"""From the configuration's `reward.function` to a grader: built-in rewards, the user's own `module:function`, or a sum.

A function is called with keyword arguments, those of its parameters that there are: `prompt`, `response`, `answer`,
`finish`, and the data row's other columns by their names (all of them if it takes `**columns`). It returns a number, or
True or False, or (as verl's `compute_score`) a dict with one of them as `score`, in which `pred` is what was taken as
the answer, and the rest is told to people; it may be `async`. docs/rewards.md shows it beside TRL's and verl's.

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
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Final, cast

from areal_async.errors import RewardError
from areal_async.messages import RewardSpec
from areal_async.rewards.sums import HTTP, LOCAL, Term, alone, terms, total, weighed
from areal_async.rewards.verdicts import Check, Grader, Outcome, given

BUILTIN: Final = {name: f"areal_async.rewards.{name}" for name in LOCAL}
"""Each module has `grader(spec) -> Grader`; loaded when it is named, since some load much."""

OWN_NAMES: Final = ("prompt", "response", "answer", "finish")
SIGNATURE: Final = "reward(prompt, response, answer, **columns) -> float | bool"
SCORE: Final = "score"  # of a dict that a function returns; its names are those of verl's `compute_score`
PRED: Final = "pred"


def verify(spec: RewardSpec) -> None:
    """RewardError if a worker couldn't start with this: all parts are looked at, and nothing is asked of `http`."""
    if local_terms(spec):
        load(spec)
    if http_term(spec):
        from areal_async.rewards.http import endpoint  # aiohttp takes longer to load than most rewards

        endpoint(spec.http)


def local_terms(spec: RewardSpec) -> tuple[Term, ...]:
    """Those that are checked in a killable child."""
    return tuple(term for term in terms(spec.function) if term.name != HTTP)


def http_term(spec: RewardSpec) -> Term | None:
    """The one that is asked for by the worker."""
    return next((term for term in terms(spec.function) if term.name == HTTP), None)


def load(spec: RewardSpec) -> Grader:
    """The grader of the local terms of `spec.function`, of which there must be one; RewardError if it can't be used.

    Puts `import_paths` on `sys.path`. If there is anything else in the sum, the outcome is a summand (`sums.weighed`).
    """
    parts = [(term, _load_one(term.name, spec)) for term in local_terms(spec)]
    assert parts, f"{spec.function!r} has nothing to load"
    if alone(terms(spec.function)):
        return parts[0][1]

    def grade(check: Check) -> Outcome:
        return total([weighed(term, _graded(grader, check), spec.values) for term, grader in parts])

    return grade


def _graded(grader: Grader, check: Check) -> Outcome:
    """One part's outcome; an error of it is its own `crash`, so that the others may still find the data bad."""
    try:
        return grader(check)
    except Exception:
        return Outcome("crash", traceback.format_exc())


def _load_one(name: str, spec: RewardSpec) -> Grader:
    if name in BUILTIN:
        return cast("Grader", importlib.import_module(BUILTIN[name]).grader(spec))
    for path in reversed(spec.import_paths):
        if path not in sys.path:
            sys.path.insert(0, path)
    module, _, attribute = name.partition(":")
    found = _attribute(_module(module, name, spec), attribute, name)
    if not callable(found):
        raise RewardError(f"{name!r} is {type(found).__name__}, not a function; write {SIGNATURE}")
    return _FunctionGrader.of(cast("Callable[..., object]", found), name)


def _module(module: str, name: str, spec: RewardSpec) -> object:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            places = ", ".join(spec.import_paths) or "the working directory and Python's own paths"
            raise RewardError(
                f"{name!r}: there is no module {error.name!r} in {places}{_near_module(module, spec)}; "
                "put its file beside the configuration, or install it into this environment"
            ) from None
        raise RewardError(f"{name!r}: importing {module} failed:\n{traceback.format_exc()}") from error
    except (Exception, SystemExit) as error:
        raise RewardError(f"{name!r}: importing {module} failed:\n{traceback.format_exc()}") from error


def _near_module(module: str, spec: RewardSpec) -> str:
    files = (file.name for path in spec.import_paths if os.path.isdir(path) for file in os.scandir(path))
    known = {name.removesuffix(".py") for name in files if name.endswith(".py") or "." not in name}
    near = difflib.get_close_matches(module.partition(".")[0], sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _attribute(module: object, path: str, name: str) -> object:
    found = module
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [known for known in dir(found) if not known.startswith("_")], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            place = getattr(module, "__file__", None) or name
            raise RewardError(f"{name!r}: {os.fspath(place)} has no {part!r}{hint}")
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
    if not isinstance(value, Mapping):
        return _judge_score(value, name, "", "")
    if SCORE not in value:
        keys = ", ".join(map(str, value)) or "nothing"
        return Outcome("crash", f"{name} returned a dict without {SCORE!r}; it has: {keys}")
    rest = ", ".join(f"{key}: {entry!s:.200}" for key, entry in value.items() if key not in (SCORE, PRED))
    extracted = value.get(PRED)
    return _judge_score(value[SCORE], name, rest, "" if extracted is None else str(extracted))


def _judge_score(value: object, name: str, said: str, extracted: str) -> Outcome:
    if type(value).__name__ in ("bool", "bool_"):  # also numpy's
        return Outcome("right" if value else "wrong", said or f"{name} returned {value}", extracted)
    if not hasattr(value, "__float__"):
        return Outcome("crash", f"{name} returned {value!r:.200}, which is not a number", extracted)
    number = float(value)
    return given(number, said if math.isfinite(number) else f"{name} returned it", extracted)
