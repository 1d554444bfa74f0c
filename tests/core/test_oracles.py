"""The reference numbers (ORACLES_DIR), against the very functions that the core uses."""

import json
from pathlib import Path
from typing import get_args

import pytest

from areal_async.core.advantages import Advantage, advantages
from areal_async.core.packing import algorithm_1, lower_bound, pack

KINDS: tuple[Advantage, ...] = get_args(Advantage)


def test_oracle_advantages(oracles: Path) -> None:
    cases = json.loads((oracles / "advantages.json").read_text())["cases"]
    assert cases
    for case in cases:
        for kind in KINDS:
            found = advantages(kind, case["rewards"], case["lengths"], case["eps"])
            for ours, expected in zip(found, case[kind], strict=True):
                assert ours == [
                    value if value is None else pytest.approx(value, rel=1e-9, abs=1e-9) for value in expected
                ], kind


def test_oracle_packing(oracles: Path) -> None:
    cases = json.loads((oracles / "packing.json").read_text())["cases"]
    assert cases
    for case in cases:
        lengths, capacity, least = case["lengths"], case["capacity"], case["min_count"]
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        bins = pack(lengths, capacity, least)
        assert sorted(index for micro in bins for index in micro) == list(range(len(lengths)))
        assert max(sum(lengths[index] for index in micro) for micro in bins) <= capacity
        assert least <= len(bins) <= min(case["algorithm1_count"], case["best_fit_decreasing_count"])
        assert max(lower_bound(lengths, capacity), least) == case["lower_bound"]
        fewest = algorithm_1(lengths, capacity, order, least=1, fewer_than=len(lengths) + 1)
        assert fewest is not None
        assert max(len(fewest), least) == case["algorithm1_count"]
        if len(lengths) == 4096:
            assert len(bins) <= case["lower_bound"] + 1
