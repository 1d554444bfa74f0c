"""What the whole controller costs a finished sample, with 8,192 samples in flight; server and trainer are scripted.

    python tools/bench/controller.py [--in-flight 8192] [--window 12]

CPU time of the controller's process, all threads; the server runs in another process. Two lengths of answers give the
cost a sample and the cost a token; two numbers in flight show what grows with it. The loop's lag is how much later
than asked a sleep of 5 ms returns.
"""

from typing import Final

import crowd
import figures

SAMPLE_US, TOKEN_US, BOOKKEEPING_US, LAG_MS = 150.0, 0.2, 50.0, 20.0  # the budgets
GROWTH: Final = 1.15  # of the cost a sample, from few in flight to many; CPU times of two runs differ by some per cent
FEW: Final = 512
SHORT, LONG = 128, 4096  # tokens of an answer, on average
WARM_UP: Final = {SHORT: 1.2, LONG: 0.1}  # turns of all that is in flight; of long answers one takes minutes
BOOKS: Final = ("core", "log", "bookkeeping")
INTERVALS: Final = (16, 128)  # server.stream_interval: the default, and what costs least


def main() -> None:
    parser = figures.parser(__doc__)
    parser.add_argument("--in-flight", type=int, default=8192)
    parser.add_argument("--window", type=float, default=12.0, help="seconds that are measured, of each run")
    options = parser.parse_args()
    report = figures.Report("controller")
    many = options.in_flight
    costs: list[tuple[int, int, int, crowd.Cost]] = []
    for wanted, tokens, interval in (
        (FEW, SHORT, INTERVALS[0]),
        *((many, tokens, interval) for interval in INTERVALS for tokens in (SHORT, LONG)),
    ):
        cost = crowd.run(
            in_flight=wanted,
            tokens=tokens,
            chunk_tokens=interval,
            window_s=options.window,
            warm_up=WARM_UP[tokens],
        )
        costs.append((wanted, tokens, interval, cost))
    columns = (
        "in flight", "answers, tokens", "stream_interval", "CPU µs a sample", "busy, % of the time", "lag p50, ms",
        "lag p99, ms", "of it with the CPU",
    )  # fmt: skip
    rows = [
        (
            cost.mean_in_flight, tokens, interval, equal_us(cost, tokens), cost.busy_share * 100, cost.late_ms(0.5),
            cost.late_ms(0.99), cost.own_ms(0.99),
        )
        for _, tokens, interval, cost in costs
    ]  # fmt: skip
    report.table("The whole controller", columns, rows)
    named = [(f"{wanted:,} × {tokens:,} tokens, interval {interval}", cost) for wanted, tokens, interval, cost in costs]
    report.table("What it does", *crowd.places_table(named))
    found = {(wanted, tokens, interval): cost for wanted, tokens, interval, cost in costs}
    for interval in INTERVALS:
        budgets(report, interval, found[many, SHORT, interval], found[many, LONG, interval], many)
    few, most = found[FEW, SHORT, INTERVALS[0]], found[many, SHORT, INTERVALS[0]]
    report.budget(
        f"controller: a sample with {many:,} in flight against {FEW}", most.sample_us / few.sample_us, at_most=GROWTH,
        unit="×", bound_by=grown(few, most),
    )  # fmt: skip
    report.finish(options.json)


def equal_us(cost: crowd.Cost, tokens: int) -> float:
    """CPU time a sample, where as many tokens arrive as in answers of this length. In a window that is shorter than an
    answer the samples that end in it don't say how many tokens arrived."""
    return cost.cpu_s / (cost.tokens / tokens) * 1e6


def budgets(report: figures.Report, interval: int, short: crowd.Cost, long: crowd.Cost, many: int) -> None:
    per_sample, per_token = split_us(short, long)
    where = f"{many:,} in flight, stream_interval {interval}"
    report.budget(
        f"controller: a finished sample, beside its tokens ({where})", per_sample, at_most=SAMPLE_US, unit="µs",
        bound_by=most_of(short),
    )  # fmt: skip
    report.budget(
        f"controller: a token ({where})", per_token, at_most=TOKEN_US, unit="µs", bound_by=most_of(long)
    )  # fmt: skip
    for tokens in (SHORT, LONG):
        allowed = tokens / (per_sample + per_token * tokens) * 1e6
        report.note(f"Answers of {tokens:,} tokens, {where}: one core allows {allowed:,.0f} tokens/s.")
    books = short.place_us(*BOOKS)
    report.budget(
        f"core and bookkeeping: a finished sample of {SHORT} tokens ({where})", books, at_most=BOOKKEEPING_US,
        unit="µs", bound_by=", ".join(f"{name} {short.place_us(name):.0f} µs" for name in BOOKS),
    )  # fmt: skip
    for tokens, cost in ((SHORT, short), (LONG, long)):
        report.budget(
            f"controller: lag of the loop, p99 ({where}, {tokens:,} tokens)", cost.late_ms(0.99), at_most=LAG_MS,
            unit="ms", bound_by=f"for {cost.own_ms(0.99):.0f} ms of it the loop was at work, else others had the CPU",
        )  # fmt: skip


def split_us(short: crowd.Cost, long: crowd.Cost) -> tuple[float, float]:
    """(µs a finished sample, µs a token that arrived): what explains the CPU time of both runs."""
    ratio = long.samples / short.samples
    per_token = (long.cpu_s - ratio * short.cpu_s) / (long.tokens - ratio * short.tokens)
    return (short.cpu_s - per_token * short.tokens) / short.samples * 1e6, per_token * 1e6


def most_of(cost: crowd.Cost) -> str:
    """The two things that take most of the time, with their shares."""
    total = cost.places.total()
    return ", ".join(f"{name} {count / total:.0%}" for name, count in cost.places.most_common(2))


def grown(few: crowd.Cost, many: crowd.Cost) -> str:
    """What takes more time a sample with many in flight."""
    more = {name: many.place_us(name) - few.place_us(name) for name in many.places}
    name = max(more, key=lambda name: more[name])
    return f"most of it in: {name}, {more[name]:+.0f} µs a sample"


if __name__ == "__main__":
    main()
