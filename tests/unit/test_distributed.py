"""The rank is read from what MLX's launcher and mpirun set."""

from __future__ import annotations

import os
import pathlib
import warnings

import pytest

from mlxmem import distributed
from mlxmem.distributed import Rank, current, note_written, warn_if_shared, with_rank

VARIABLES = (
    "MLX_RANK",
    "MLX_WORLD_SIZE",
    "MLX_HOSTFILE",
    "MLX_IBV_DEVICES",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"MLX_RANK": "0"}, Rank(0, None)),
        ({"MLX_RANK": "1", "MLX_WORLD_SIZE": "4"}, Rank(1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}, Rank(3, 8)),
        # mlx.launch's own variables come before those of an mpirun around it.
        (
            {
                "MLX_RANK": "1",
                "MLX_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_SIZE": "1",
            },
            Rank(1, 2),
        ),
        # A size that does not go with the rank is none.
        ({"MLX_RANK": "4", "MLX_WORLD_SIZE": "4"}, Rank(4, None)),
        ({"MLX_RANK": "2", "MLX_WORLD_SIZE": "many"}, Rank(2, None)),
        *(({"MLX_RANK": bad}, None) for bad in ("", "-1", "one", " 1", "1_0", "²")),
        ({"MLX_RANK": "9" * 5000}, None),
        ({"MLX_WORLD_SIZE": "2"}, None),
    ],
)
def test_the_rank(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: Rank | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert current() == expected


@pytest.mark.parametrize("variable", ["MLX_HOSTFILE", "MLX_IBV_DEVICES"])
@pytest.mark.parametrize(
    ("content", "size"),
    [
        ('[["127.0.0.1:32323"], ["127.0.0.1:32324"], ["127.0.0.1:32325"]]\n', 3),
        ("\n", 1),  # what mlx.launch -n 1 writes
        ("[", None),
        ("2", None),
        ("\0", None),
    ],
)
def test_the_size_of_a_ring_is_that_of_its_list(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    variable: str,
    content: str,
    size: int | None,
) -> None:
    path = tmp_path / "hosts"
    path.write_text(content)
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv(variable, str(path))
    assert current() == Rank(0, size)
    path.unlink()
    assert current() == Rank(0, None)


def test_how_a_rank_is_shown() -> None:
    assert str(Rank(0, 2)) == "rank 0 of 2"
    assert str(Rank(3, None)) == "rank 3"
    assert with_rank("out.pickle", Rank(1, 2)) == "out.rank1.pickle"
    assert with_rank("/a.b/out", Rank(12, None)) == "/a.b/out.rank12"


def test_only_what_another_process_has_just_written_is_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    # GIVEN a file of a second after the epoch
    monkeypatch.setattr(distributed, "_written", {})
    path = tmp_path / "out.pickle"
    path.write_bytes(b"")
    os.utime(path, ns=(10**9, 10**9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        # WHEN, THEN nothing is said without a rank, with one alone, of an older file,
        # of none, and of a device
        warn_if_shared(path, since_us=0)
        monkeypatch.setenv("MLX_RANK", "0")
        monkeypatch.setenv("MLX_WORLD_SIZE", "1")
        warn_if_shared(path, since_us=0)
        monkeypatch.setenv("MLX_WORLD_SIZE", "2")
        warn_if_shared(path, since_us=1_000_001)
        warn_if_shared(tmp_path / "other.pickle", since_us=0)
        warn_if_shared("/dev/null", since_us=0)
    with pytest.warns(UserWarning, match="rank 0 of 2 replaces") as caught:
        warn_if_shared(path, since_us=1_000_000)
    assert repr(str(tmp_path / "out.rank0.pickle")) in str(caught[0].message)

    # WHEN it is this process's own, THEN nothing is said, until another one comes
    note_written(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_shared(path, since_us=0)
    os.utime(path, ns=(2 * 10**9, 2 * 10**9))
    with pytest.warns(UserWarning, match="another process"):
        warn_if_shared(path, since_us=0)
