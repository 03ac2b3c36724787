"""gtrain.data.ingest.dictionary: numbers for strings, whatever their hashes are."""

from __future__ import annotations

import numpy as np
import pytest

from gtrain.data.ingest import dictionary
from gtrain.data.ingest.dictionary import PAD, Dictionary, Hash, Keys, hash_keys


def all_alike(data, starts, lengths, out) -> None:
    """A hash that tells nothing apart."""
    out[:] = 7


def by_length(data, starts, lengths, out) -> None:
    """A hash whose values sit in neighbouring slots and whose tags are all the same."""
    out[:] = lengths % 5


def keys_of(names: list[str], hash_names: Hash) -> Keys:
    raw = [name.encode() for name in names]
    lengths = np.array([len(name) for name in raw], dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32)
    data = np.frombuffer(b"".join(raw) + bytes(PAD), dtype=np.uint8)
    hashes = np.empty(len(names), dtype=np.uint64)
    hash_names(data, starts, lengths, hashes)
    return Keys(data, starts, lengths, hashes)


def numbered(names: list[str]) -> list[int]:
    """The same by a plain dictionary."""
    known: dict[str, int] = {}
    return [known.setdefault(name, len(known)) for name in names]


def some_names(count: int) -> list[str]:
    rng = np.random.default_rng(5)
    names = [f"n{i}" for i in range(count)] + [
        "é",
        "e",
        "日本",
        "日",
        "x" * 8,
        "x" * 9,
        "x" * 7,
        "y" * 100_000,
        "\x00",
        "\x00\x00",
    ]
    return [names[i] for i in rng.integers(0, len(names), 4 * len(names))] + names


@pytest.mark.parametrize(("hash_names", "count"), [(hash_keys, 20_000), (all_alike, 300), (by_length, 300)])
def test_ids_are_those_of_a_plain_dictionary(hash_names: Hash, count: int) -> None:
    names = some_names(count)
    numbers = Dictionary(hash_names, first_slots=2)
    found: list[int] = []
    for first in range(0, len(names), 7001):  # the table grows between the calls
        found += numbers.encode(keys_of(names[first : first + 7001], hash_names)).tolist()
    assert found == numbered(names)
    assert len(numbers) == len(set(names))
    assert numbers.freeze().to_pylist() == list(dict.fromkeys(names))


def test_growth_within_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dictionary, "STRIDE", 3)
    names = some_names(500)
    numbers = Dictionary(first_slots=1)
    assert numbers.encode(keys_of(names, hash_keys)).tolist() == numbered(names)
    assert numbers.freeze().to_pylist() == list(dict.fromkeys(names))


def test_names_behind_each_other_are_not_confused() -> None:
    """Keys that are prefixes of each other, read from a buffer where other bytes follow them."""
    names = ["abcdefgh"[:size] for size in range(1, 9)] + ["abcdefghabcdefgh"[:size] for size in range(9, 17)]
    numbers = Dictionary()
    assert numbers.encode(keys_of([*names, *names[::-1]], hash_keys)).tolist() == [*range(16), *range(15, -1, -1)]


def test_hashes_differ_where_names_do() -> None:
    names = [f"user/{i:07d}" for i in range(200_000)]
    hashes = keys_of(names, hash_keys).hashes
    assert np.unique(hashes).size == len(names)
    counts = np.bincount((hashes & np.uint64(1023)).astype(np.int64), minlength=1024)
    expected = len(names) / 1024
    assert ((counts - expected) ** 2 / expected).sum() < 1023 + 5 * np.sqrt(2 * 1023)  # chi-square of the low bits


def test_empty_dictionary() -> None:
    assert Dictionary().freeze().to_pylist() == []
