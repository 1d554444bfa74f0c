"""What a run keeps for people is read whole or not at all, also while it is being written."""

import io
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from areal_async.errors import LogError
from areal_async.runfiles import (
    ABOUT,
    CHECKS,
    READ_BYTES,
    About,
    Check,
    prox_about,
    prox_of,
    prox_path,
    prox_steps,
    read_checks,
)

WHY = "<script>\nµ\u202e"
CHECK = Check(sample="17.3", attempt=1, at=2.5, verdict="crash", reward=None, why=WHY, extracted="4\x002", seconds=0.25)
OTHER = Check(sample="2.0", attempt=0, at=3.5, verdict="right", reward=1.0)


def line(check: Check) -> bytes:
    return msgspec.json.encode(check) + b"\n"


def test_checks_of_a_file_cut_at_any_byte_come_once_and_in_order(tmp_path: Path) -> None:
    whole = line(CHECK) + line(OTHER) + line(CHECK)
    for cut in range(0, len(whole) + 1, 13):
        (tmp_path / CHECKS).write_bytes(whole[:cut])
        first, since = read_checks(tmp_path)
        assert read_checks(tmp_path, since) == ([], since)
        (tmp_path / CHECKS).write_bytes(whole)
        rest, end = read_checks(tmp_path, since)
        assert first + rest == [CHECK, OTHER, CHECK]
        assert end == len(whole)


def test_what_is_no_line_is_left_out(tmp_path: Path) -> None:
    assert read_checks(tmp_path, 7) == ([], 7)
    lost = bytes(300) + b"\n" + b'{"sample": "\xff"}\n[]\n\n'
    (tmp_path / CHECKS).write_bytes(line(CHECK) + lost + line(OTHER))
    assert read_checks(tmp_path)[0] == [CHECK, OTHER]
    hole = bytes(2 * READ_BYTES + 5) + b"\n"
    (tmp_path / CHECKS).write_bytes(hole + line(OTHER))
    found, since = [], 0
    for _ in range(4):
        some, since = read_checks(tmp_path, since)
        found += some
    assert found == [OTHER]


def write(path: Path, method: int = zipfile.ZIP_STORED, **members: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members.items():
            file.writestr(name.replace("_", "."), data)


def npy(values: object) -> bytes:
    data = io.BytesIO()
    np.save(data, values)
    return data.getvalue()


def test_a_file_of_prox_is_read_by_sample_and_by_numpy(tmp_path: Path) -> None:
    path, values = prox_path(tmp_path, 12), np.array([-1.5, np.nan, -0.25], np.float32)
    assert path == tmp_path / "prox" / "step-000012.npz"
    assert (prox_of(tmp_path, 12, "17.3"), prox_about(tmp_path, 12), prox_steps(tmp_path)) == (None, None, [])
    about = About(step=12, branch=1, attempts={"17.3": 2})
    write(path, **{"17_3_npy": npy(values), ABOUT: msgspec.json.encode(about)})
    (path.parent / ".step-000013.tmp").touch()
    found = prox_of(tmp_path, 12, "17.3")
    assert found is not None
    np.testing.assert_array_equal(found, values)
    assert prox_about(tmp_path, 12) == about
    assert prox_of(tmp_path, 12, "17.4") is None
    assert prox_steps(tmp_path) == [12]
    with np.load(path) as file:
        np.testing.assert_array_equal(file["17.3"], values)


def test_any_damage_is_told_and_never_taken_for_numbers(tmp_path: Path) -> None:
    path, values = prox_path(tmp_path, 3), np.arange(4, dtype=np.float32)
    write(path, **{"1_0_npy": npy(values), ABOUT: msgspec.json.encode(About(step=3, branch=0, attempts={"1.0": 0}))})
    whole = path.read_bytes()
    for place in range(0, len(whole), 11):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :]):
            path.write_bytes(damaged)
            try:
                found = prox_of(tmp_path, 3, "1.0")
                prox_about(tmp_path, 3)
            except LogError as error:
                assert str(path) in str(error)  # noqa: PT017
            else:
                assert found is None or np.array_equal(found, values)


@pytest.mark.parametrize("member", [npy(np.arange(3)), npy(np.zeros((2, 2), np.float32)), b"PK\x03\x04", b""])
def test_what_is_no_row_of_float32_is_refused(tmp_path: Path, member: bytes) -> None:
    write(prox_path(tmp_path, 3), **{"1_0_npy": member, ABOUT: b"[]"})
    with pytest.raises(LogError, match="may be deleted"):
        prox_of(tmp_path, 3, "1.0")
    with pytest.raises(LogError, match="may be deleted"):
        prox_about(tmp_path, 3)


def test_what_would_grow_when_it_is_read_is_refused(tmp_path: Path) -> None:
    write(prox_path(tmp_path, 3), zipfile.ZIP_DEFLATED, **{"1_0_npy": npy(np.zeros(100_000, np.float32))})
    with pytest.raises(LogError, match="compressed"):
        prox_of(tmp_path, 3, "1.0")
