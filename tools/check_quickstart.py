"""What a quickstart run must have shown: reads its folder, scores both models, prints a table; exit 1 if not so.

    python tools/check_quickstart.py runs/quickstart-20260101-120000

Scores by `areal-async eval` (a fresh vLLM server, temperature 1), and by transformers alone (greedy, no vLLM).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "quickstart.yaml"
GREEDY_PROBLEMS = 200
LONGEST = 160  # tokens, as in the configuration
STATES = ("trained", "filtered", "stale", "failed", "cancelled", "outstanding", "training")


def evaluated(model: Path) -> float:
    """Score on the 500 held-out problems by the command line."""
    command = [sys.executable, "-m", "areal_async", "eval", str(CONFIG), "--model", str(model), "--json"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(out)["score"])


def greedy(model: Path) -> float:
    """Share of right answers with transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines = (CONFIG.parent / "quickstart" / "eval.jsonl").read_text().splitlines()[:GREEDY_PROBLEMS]
    rows = [json.loads(line) for line in lines]
    network = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    with torch.inference_mode():
        out = network.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
    answers = out[:, inputs["input_ids"].shape[1] :]
    ended = (answers == tokenizer.eos_token_id).any(dim=1).tolist()
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = [text.rpartition(">")[2] == row["answer"] for text, row in zip(texts, rows, strict=True)]
    return sum(is_right and has_ended for is_right, has_ended in zip(right, ended, strict=True)) / len(rows)


def balanced(ledger: dict[str, int]) -> bool:
    groups = ledger["admitted"] == sum(ledger[state] for state in STATES)
    return groups and ledger["samples_admitted"] == sum(ledger[f"samples_{state}"] for state in STATES)


def findings(run: Path) -> list[tuple[str, str, str, bool]]:
    """(what, measured, wanted, whether it holds)."""
    steps: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = sum(step["samples"] for step in steps)
    mixed = sum(step["mixed_share"] * step["samples"] for step in steps) / samples
    lag_max = [step["lag_max"] for step in steps]
    lag_mean = sum(step["lag_mean"] for step in steps) / len(steps)
    later = steps[1:]  # the first step's time has the start-up in it
    busy = sum(step["both_busy_share"] * step["step_s"] for step in later) / sum(step["step_s"] for step in later)
    base, trained, alone = (
        evaluated(CONFIG.parent / "quickstart" / "model"),
        evaluated(run / "model"),
        greedy(run / "model"),
    )
    return [
        ("base model, score of 500", f"{base:.3f}", "≤ 0.65", base <= 0.65),
        ("trained model, score of 500", f"{trained:.3f}", "≥ 0.92", trained >= 0.92),
        (f"transformers alone, greedy, {GREEDY_PROBLEMS}", f"{alone:.3f}", "≥ 0.90", alone >= 0.9),
        ("samples with tokens of two versions or more", f"{mixed:.1%}", "≥ 5 %", mixed >= 0.05),
        ("largest lag of any step", str(max(lag_max)), "2 to 3 (η)", 2 <= max(lag_max) <= 3),
        ("mean lag", f"{lag_mean:.2f}", "≥ 0.5", lag_mean >= 0.5),
        ("largest mismatch at lag 0, nats", f"{max(s['mismatch_max'] for s in steps):.1e}", "≤ 1e-4",
         max(s["mismatch_max"] for s in steps) <= 1e-4),
        ("trainer and server busy at the same time", f"{busy:.0%} of the time after step 0", "stated", True),
        ("ledger balances", f"in {sum(balanced(s['ledger']) for s in steps)} of {len(steps)} steps", "all",
         all(balanced(s["ledger"]) for s in steps)),
        ("whole run", f"{steps[-1]['time_s']:.0f} s", "≤ 240 s", steps[-1]["time_s"] <= 240),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    rows = findings(parser.parse_args().run)
    table = Table(title="The quickstart")
    for name in ("what", "measured", "wanted", ""):
        table.add_column(name)
    for what, measured, wanted, holds in rows:
        table.add_row(what, measured, wanted, "holds" if holds else "DOES NOT HOLD")
    Console(width=120).print(table)
    return 0 if all(row[3] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
