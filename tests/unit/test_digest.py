"""The digest against its specification, and what it has to catch."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_model import reference_digest

import kvxfer
from kvxfer import _core

VARIANTS = _core.simd_variants()


@pytest.fixture(autouse=True)
def _restore_variant():
    before = _core.simd_variant()
    yield
    _core.set_simd_variant(before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_follows_the_specification(variant):
    _core.set_simd_variant(variant)
    rng = np.random.default_rng(1)
    for size in [*range(0, 200), 1000, 4096, 65537]:
        data = rng.integers(0, 256, size, np.uint8)
        assert _core.digest(data, size) == reference_digest(data.tobytes(), size), size
    # Operands of all ones: the products and the sum wrap round.
    ones = b"\xff" * 100_000
    assert _core.digest(ones, 2**64 - 1) == reference_digest(ones, 2**64 - 1)


def test_known_values():
    """These travel between versions and machines: they never change."""
    assert _core.digest(b"", 0) == (0, 0xC7B56398C24A4B50)
    assert _core.digest(bytes(range(256)), 42) == (0x7050300FEFCFAF80, 0x7B225C1A64936BF2)


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1), st.integers(0, 63))
def test_alignment_does_not_matter(data, seed, offset):
    shifted = memoryview(bytes(offset) + data)[offset:]
    assert _core.digest(shifted, seed) == reference_digest(data, seed)


def test_the_seed_shows_in_mix_only():
    digests = {_core.digest(b"some chunk", seed) for seed in range(1000)}
    assert len({digest[1] for digest in digests}) == 1000
    assert len({digest[0] for digest in digests}) == 1


def samples():
    """Data of little and of much variety: what a KV cache holds and what a fresh one holds."""
    rng = np.random.default_rng(5)
    yield "zeros", np.zeros(4096, np.uint8)
    yield "ones", np.full(4096, 0xFF, np.uint8)
    yield "one word", np.tile(rng.integers(0, 256, 8, np.uint8), 512)
    yield "floats", rng.standard_normal(1024).astype(np.float32).view(np.uint8)
    yield "random", rng.integers(0, 256, 4096, np.uint8)


SAMPLES = dict(samples())


@pytest.mark.parametrize("name", SAMPLES)
def test_every_flipped_bit_changes_the_sum(name):
    data = SAMPLES[name][:512].copy()
    whole = _core.digest(data)
    for bit in range(8 * data.size):
        data[bit // 8] ^= 1 << bit % 8
        changed = _core.digest(data)
        assert changed[0] != whole[0]
        assert changed[1] != whole[1]
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_the_same_bit_flipped_in_two_words_changes_mix(name, bit):
    """Two such flips often cancel out in the sum: always, where the bit is the highest."""
    words = SAMPLES[name].copy().view(np.uint64)
    whole = _core.digest(words)[1]
    rng = np.random.default_rng(bit)
    flip = np.uint64(1 << bit)
    for _ in range(2000):
        first, second = rng.choice(words.size, 2, replace=False)
        words[first] ^= flip
        words[second] ^= flip
        assert _core.digest(words)[1] != whole
        words[first] ^= flip
        words[second] ^= flip


@pytest.mark.parametrize("name", ["floats", "random"])
@pytest.mark.parametrize("size", [2, 4, 8, 64, 128, 256, 1024])
def test_pieces_that_change_places_change_mix(name, size):
    data = SAMPLES[name].copy()
    pieces = data.reshape(-1, size)
    whole = _core.digest(data)[1]
    rng = np.random.default_rng(size)
    for _ in range(500):
        first, second = rng.choice(len(pieces), 2, replace=False)
        if np.array_equal(pieces[first], pieces[second]):
            continue
        pieces[[first, second]] = pieces[[second, first]]
        assert _core.digest(data)[1] != whole
        pieces[[first, second]] = pieces[[second, first]]


def test_halves_of_words_that_change_places_change_mix():
    words = SAMPLES["random"].copy().view(np.uint32).reshape(-1, 2)
    whole = _core.digest(words)[1]
    for index in range(len(words)):
        words[index] = words[index, ::-1].copy()
        assert _core.digest(words)[1] != whole
        words[index] = words[index, ::-1].copy()
    # All of them at once: a difference of the sum could cancel out.
    assert _core.digest(np.ascontiguousarray(words[:, ::-1]))[1] != whole


def test_what_is_taken_from_one_word_and_given_to_another_changes_mix():
    words = SAMPLES["random"].copy().view(np.uint64)
    whole = _core.digest(words)
    rng = np.random.default_rng(3)
    for _ in range(2000):
        first, second = rng.choice(words.size, 2, replace=False)
        amount = 1 << int(rng.integers(0, 64))
        amounts = np.array([amount, 2**64 - amount], np.uint64)
        words[[first, second]] += amounts
        changed = _core.digest(words)
        assert changed[0] == whole[0]
        assert changed[1] != whole[1]
        words[[first, second]] -= amounts


def test_the_length_shows():
    sizes = [*range(0, 1025), 4096, 8192]
    assert len({_core.digest(bytes(size))[1] for size in sizes}) == len(sizes)


def test_changes_spread_over_all_bits_of_mix():
    """Flipping any input bit flips each output bit in about half of the cases."""
    rng = np.random.default_rng(11)
    data = rng.integers(0, 256, 256, np.uint8)
    whole = _core.digest(data)[1]
    flips = np.zeros(64)
    for bit in range(8 * data.size):
        data[bit // 8] ^= 1 << bit % 8
        changed = whole ^ _core.digest(data)[1]
        flips += [changed >> position & 1 for position in range(64)]
        data[bit // 8] ^= 1 << bit % 8
    share = flips / (8 * data.size)
    assert share.min() > 0.42
    assert share.max() < 0.58


def test_no_two_of_many_similar_inputs_collide():
    """Where only 32 bits of mix counted, about 10 of these would; where 48 do, none."""
    data = np.zeros(128, np.uint8)
    words = data.view(np.uint32)
    seen = set()
    for value in range(300_000):
        words[value % 32] = value
        words[(value * 7 + 3) % 32] ^= 0x80000000
        seen.add(_core.digest(data)[1] & 0xFFFFFFFFFFFF)
    assert len(seen) == 300_000


def run_with_simd(value: str) -> subprocess.CompletedProcess[str]:
    code = "from kvxfer import _core; print(_core.simd_variant())"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KVXFER_SIMD": value},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_environment_forces_a_variant(variant):
    assert run_with_simd(variant).stdout.strip() == variant


def test_a_variant_that_cannot_run_is_refused():
    done = run_with_simd("mmx")
    assert done.returncode != 0
    assert 'KVXFER_SIMD asks for the SIMD variant "mmx"' in done.stderr
    assert "scalar" in done.stderr
    with pytest.raises(kvxfer.InvalidError, match="cannot run here"):
        _core.set_simd_variant("mmx")
    assert _core.simd_variant() in VARIANTS
