"""What a function says that no text can hold still tells why its check ended."""

import json
from pathlib import Path

import pytest

from areal_async.cli import main

FUNCTION = r"""
def odd(response):
    raise ValueError("half a pair: \udc80, and \ud800")
"""


@pytest.mark.slow
def test_half_of_a_surrogate_pair_in_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd_words.py").write_text(FUNCTION)
    (tmp_path / "answers.jsonl").write_text('{"completion": "2"}\n')
    monkeypatch.chdir(tmp_path)
    assert main(["score", "--reward", "odd_words:odd", "--workers", "1", "answers.jsonl"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["verdict"] == "crash"
    assert "ValueError: half a pair: \\udc80, and \\ud800" in result["reason"]
