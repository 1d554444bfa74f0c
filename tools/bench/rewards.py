"""How many checks two reward workers make in a second: `python tools/bench/rewards.py`. Ratios are within this run.

Ours go the whole way: pool, wire, worker, a child of its own for each check, a jail for code, as `areal-async score`
has them. Beside them, what one would write otherwise: math-verify in a plain pool of two processes, and
`subprocess.run([python, "-c", code])` for each test in such a pool, without any protection.
Rounds take turns and the best of each counts, since the machine's speed changes with what else it does.

What bounds a check is said by two more figures: a reward that does next to nothing (`exact`) has only the way and the
child; the same grader called in a loop, in one process, has neither. Processor time is that of the controller, the
workers and everything that they started.
"""

import asyncio
import random
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import figures
import msgspec

from areal_async.config import RewardConfig
from areal_async.controller import scoring
from areal_async.messages import RewardOptions, RewardSpec, Verdict
from areal_async.rewards.loading import load
from areal_async.rewards.verdicts import Check
from areal_async.rollout.completions import Record, records

MATH_PER_S: Final = 200.0  # the budgets
CODE_PER_S: Final = 60.0
WORKERS: Final = 2
ROUNDS: Final = 3
MATH_CHECKS: Final = 1500
CODE_CHECKS: Final = 300
CHUNK: Final = 16  # pairs that a process of the plain pool takes at a time
FEW: Final = 8  # of which the start is measured, to be left out
SEED: Final = 1


class Pair(NamedTuple):
    """An answer, what it is compared with, and whether it is right."""

    response: str
    gold: str
    right: bool


class Program(NamedTuple):
    """A response with a program, its tests (input, expected output), and whether it is right."""

    code: str
    tests: tuple[tuple[str, str], ...]
    right: bool


class Found(NamedTuple):
    """Checks per second; processor time of one of them, start-up left out, with the pool's; share that was right."""

    per_s: float
    cpu_ms: float
    agreed: float


Asked: TypeAlias = Sequence[Pair] | Sequence[Program]
Made: TypeAlias = tuple[list[Verdict] | list[bool], float]
"""What was said, and the seconds that it took."""


class Kind(NamedTuple):
    make: Callable[[Asked], Made]
    asked: Asked


def main() -> None:
    parser = figures.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--math", type=int, default=MATH_CHECKS, help="checks of mathematics in a round")
    parser.add_argument("--code", type=int, default=CODE_CHECKS, help="checks of code in a round")
    options = parser.parse_args()
    simple, mixed = simple_pairs(options.math), mixed_pairs(options.math)
    programs = small_programs(options.code)
    kinds = {
        "exact": Kind(
            partial(ours, "exact"), [pair._replace(response=pair.gold if pair.right else "") for pair in simple]
        ),
        "math, simple numbers": Kind(partial(ours, "math"), simple),
        "math-verify, simple numbers": Kind(partial(plain, verified, CHUNK), simple),
        "math, simple numbers, in one process": Kind(in_one_process, simple),
        "math, symbolic ones among them": Kind(partial(ours, "math"), mixed),
        "math-verify, symbolic ones among them": Kind(partial(plain, verified, CHUNK), mixed),
        "math, symbolic ones among them, in one process": Kind(in_one_process, mixed),
        "code, 2 tests each": Kind(partial(ours, "code"), programs),
        "subprocess.run, 2 tests each": Kind(partial(plain, ran, 1), programs),
    }
    started_ms = {
        # twice: what this process itself loads, it loads once
        name: 1000 * min(measured(kind.make, kind.asked[:FEW])[1] for _ in range(2))
        for name, kind in kinds.items()
    }
    best: dict[str, Found] = {}
    for _ in range(options.rounds):
        for name, kind in kinds.items():
            (said, seconds), cpu_s = measured(kind.make, kind.asked)
            count = len(kind.asked)
            found = Found(
                count / seconds, (1000 * cpu_s - started_ms[name]) / (count - FEW), agreement(said, kind.asked)
            )
            best[name] = max(best.get(name, found), found)
    report = figures.Report("rewards")
    tell(report, best)
    report.finish(options.json)


def measured(make: Callable[[Asked], Made], asked: Asked) -> tuple[Made, float]:
    """What was made, and the processor time of this process and all that it has waited for, seconds."""
    before = cpu_time_s()
    made = make(asked)
    return made, cpu_time_s() - before


def cpu_time_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def tell(report: figures.Report, best: dict[str, Found]) -> None:
    rows = [(name, found.per_s, found.cpu_ms, 100 * found.agreed) for name, found in best.items()]
    title = f"Checks with {WORKERS} workers, or {WORKERS} processes of a plain pool"
    report.table(title, ("what", "checks/s", "CPU ms each", "% said rightly"), rows)
    math, code = best["math, simple numbers"], best["code, 2 tests each"]
    way, alone = best["exact"].cpu_ms, best["math, simple numbers, in one process"].cpu_ms
    report.budget(
        "simple math checks", math.per_s, at_least=MATH_PER_S, unit="/s",
        bound_by=f"{math.cpu_ms:.1f} ms of CPU: the way and a small child {way:.1f}, the grader {alone:.2f}, the rest "
        "the child's size",
    )  # fmt: skip
    report.budget(
        "small code checks, 2 tests each", code.per_s, at_least=CODE_PER_S, unit="/s",
        bound_by=f"{code.cpu_ms:.1f} ms of CPU: the way and a child {way:.1f}, the rest its jail and interpreter",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- what is asked


def simple_pairs(count: int) -> list[Pair]:
    """Whole numbers and decimals in a box, half of them another one."""
    random_ = random.Random(SEED)
    return [_pair(random_, str(random_.choice([random_.randint(-999, 99999), random_.randint(1, 9999) / 100])))
            for _ in range(count)]  # fmt: skip


def mixed_pairs(count: int) -> list[Pair]:
    """A third each: simple ones; fractions, roots, points, intervals and percents; expressions that take algebra."""
    random_ = random.Random(SEED)
    made = simple_pairs(-(-count // 3)) + [_written(random_) for _ in range(-(-count // 3))]
    made += [_symbolic(random_) for _ in range(count - len(made))]
    random_.shuffle(made)
    return made


def _pair(random_: random.Random, gold: str) -> Pair:
    right = random_.random() < 0.5
    given = gold if right else gold + "1"
    return Pair(f"We add them up and find {given}. So the answer is $\\boxed{{{given}}}$.", gold, right)


def _written(random_: random.Random) -> Pair:
    """The same value in another writing, or another value."""
    a, b = random_.sample(range(2, 40), 2)
    gold, same, other = random_.choice([
        (f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}", f"{a + 1}/{b}"),
        (f"({a}, {b})", f"({a},{b})", f"({b},{a})"),
        (f"{a}\\sqrt{{{b}}}", f"{a} \\cdot \\sqrt{{{b}}}", f"{b}\\sqrt{{{a}}}"),
        (f"[{a}, \\infty)", f"[{a},\\infty)", f"({a},\\infty)"),
        (f"{a / 4}", f"\\frac{{{a}}}{{4}}", f"\\frac{{{a}}}{{5}}"),
        (f"{a}\\%", f"{a / 100}", f"{b / 100}"),
    ])  # fmt: skip
    return _one_of(random_, gold, same, other)


def _symbolic(random_: random.Random) -> Pair:
    a, b = random_.sample(range(2, 12), 2)
    gold, same, other = random_.choice([
        (f"(x+{a})(x-{b})", f"x^2 + {a - b}x - {a * b}", f"x^2 + {a - b}x + {a * b}"),
        (f"\\frac{{1}}{{\\sqrt{{{a}}}}}", f"\\frac{{\\sqrt{{{a}}}}}{{{a}}}", f"\\frac{{\\sqrt{{{a}}}}}{{{b}}}"),
        (f"{a}e^{{2x}}", f"{a}(e^x)^2", f"{a}e^{{{b + 1}x}}"),
        (f"\\frac{{x^2-{a * a}}}{{x-{a}}}", f"x+{a}", f"x-{a}"),
        (f"{a}\\sin^2 x + {a}\\cos^2 x", f"{a}", f"{b}"),
    ])  # fmt: skip
    return _one_of(random_, gold, same, other)


def _one_of(random_: random.Random, gold: str, same: str, other: str) -> Pair:
    right = random_.random() < 0.5
    return Pair(f"It follows that the answer is $\\boxed{{{same if right else other}}}$.", gold, right)


def small_programs(count: int) -> list[Program]:
    """Programs that read two numbers, half of them wrong."""
    random_ = random.Random(SEED)
    made = []
    for _ in range(count):
        factor, right = random_.randint(2, 99), random_.random() < 0.5
        tests = tuple((f"{a} {b}\n", f"{a * factor + b}\n") for a, b in ((random_.randint(0, 99), 3), (1, 2)))
        sign = "+" if right else "-"
        code = f"def solve(a, b):\n    return a * {factor} {sign} b\n\n"
        code += "a, b = map(int, input().split())\nprint(solve(a, b))\n"
        made.append(Program(code, tests, right))
    return made


# ---------------------------------------------------------------------------------------------------------------- ours


def ours(function: str, asked: Asked) -> Made:
    return scored(function, [line_of(one) for one in asked])


def line_of(one: Pair | Program) -> dict[str, object]:
    """A record as `areal-async score` reads it."""
    if isinstance(one, Pair):
        return {"completion": one.response, "answer": one.gold}
    tests = {"inputs": [given for given, _ in one.tests], "outputs": [expected for _, expected in one.tests]}
    return {"completion": f"Here it is:\n```python\n{one.code}```\n", "tests": tests}


def scored(function: str, lines: Sequence[dict[str, object]]) -> Made:
    """Verdicts in the order of the lines; seconds from when the workers were there."""
    config = RewardConfig(function=function, workers=WORKERS)
    spec = RewardSpec(**{name: getattr(config, name) for name in RewardOptions.__struct_fields__})
    begun: list[float] = []
    said: list[Verdict] = []

    async def chunks() -> AsyncIterator[bytes]:
        for line in lines:
            yield msgspec.json.encode(line) + b"\n"

    async def write(results: Sequence[scoring.Scored]) -> None:
        said.extend(found.result.verdict for found in results)

    source: AsyncIterator[Record] = records(chunks(), "benchmark")
    asyncio.run(scoring.score(config, spec, source, write, started=lambda: begun.append(time.perf_counter())))
    return said, time.perf_counter() - begun[0]


def in_one_process(pairs: Asked) -> Made:
    """One grader in a loop: no child, no wire."""
    grade = load(RewardSpec(function="math"))
    checks = [
        Check(prompt="", response=pair.response, answer=pair.gold, finish="stop", columns={})
        for pair in pairs
        if isinstance(pair, Pair)
    ]
    begun = time.perf_counter()
    said = [grade(check).verdict for check in checks]
    return said, time.perf_counter() - begun


def agreement(said: Sequence[Verdict | bool], asked: Asked) -> float:
    """Share of checks that said what is so."""
    return sum((verdict in ("right", True)) == one.right for verdict, one in zip(said, asked, strict=True)) / len(asked)


# --------------------------------------------------------------------------------------------------- in a plain pool


def plain(check: Callable[..., bool], chunk: int, asked: Asked) -> Made:
    with ProcessPoolExecutor(WORKERS) as pool:
        list(pool.map(check, asked[:FEW]))  # imports
        begun = time.perf_counter()
        said = list(pool.map(check, asked, chunksize=chunk))
        return said, time.perf_counter() - begun


def verified(pair: Pair) -> bool:
    """As math-verify's README has it."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${pair.gold}$"), parse(pair.response)))


def ran(program: Program) -> bool:
    """No network, memory, file or process is kept from it."""
    for given, expected in program.tests:
        done = subprocess.run(
            [sys.executable, "-c", program.code], input=given, capture_output=True, text=True, timeout=6
        )
        if done.returncode or done.stdout.strip() != expected.strip():
            return False
    return True


if __name__ == "__main__":
    main()
