"""The ops of serving beyond their samples: what is drawn follows the probabilities and no other row, truncation by hand,
counts, and adapters that keep to themselves."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine, ops
from surogate_core.ops import sample as op
from surogate_core.ops.record import Sample
from surogate_core.weights.quants import f32_to_bf16

from .backends import choices

KERNELS = pytest.mark.parametrize("kernel", choices("sample"))


def requests(rows: int, **settings) -> tuple[np.ndarray, np.ndarray]:
    """`sampling` and `draw` of rows that differ in their positions alone; settings by name of their column."""
    sampling, draw = np.zeros((rows, op.SAMPLING), np.float32), np.zeros((rows, op.DRAW), np.int32)
    sampling[:, [op.TEMPERATURE, op.TOP_P, op.REPETITION]] = 1.0
    draw[:, op.POSITION], draw[:, [op.LOGPROBS, op.TARGET]] = np.arange(rows), -1
    for name, value in settings.items():
        column = getattr(op, name.upper())
        (draw if name in ("seed_low", "choice", "top_k", "flags", "position") else sampling)[:, column] = value
    return sampling, draw


def run_sample(kernel, logits, sampling, draw, places=None, mask=None, bias=None, counts=None):
    """Returns the sampled ids; `counts` is changed."""
    rows = len(logits)
    places = np.arange(rows, dtype=np.int32) if places is None else places
    ids, last_ids = np.zeros(rows, np.int32), np.full(max(rows, 1 + places.max(initial=0)), 7, np.int32)
    operands = [np.ascontiguousarray(logits, np.float32), sampling, draw, places, mask, bias]
    engine.run_op("sample", operands, [ids, last_ids, counts], {}, **kernel)
    known = (places >= 0) & (places < len(last_ids))
    np.testing.assert_array_equal(last_ids[places[known]], ids[known])
    return ids


@KERNELS
@pytest.mark.parametrize("settings, kept", [
    ({}, 6), ({"temperature": 0.5}, 6), ({"top_k": 3}, 3), ({"top_p": 0.6}, 2), ({"min_p": 0.2}, 4),
    ({"top_k": 4, "top_p": 0.89, "min_p": 0.2}, 3), ({"temperature": 2.0, "top_p": 0.5}, 2),
])
def test_draws_follow_the_probabilities(kernel, settings, kept):
    """Of shares 0.4, 0.3, 0.15, 0.1, 0.03, 0.02, in another order. 20000 draws: off by 0.0035 at one standard deviation."""
    shares = np.array([0.1, 0.4, 0.02, 0.3, 0.03, 0.15])
    rows = 20000
    ids = run_sample(kernel, np.tile(np.log(shares), (rows, 1)), *requests(rows, **settings))
    expected = shares ** (1.0 / settings.get("temperature", 1.0))
    expected[np.argsort(-shares)[kept:]] = 0.0
    expected /= expected.sum()
    drawn = np.bincount(ids, minlength=6) / rows
    assert (drawn[expected == 0.0] == 0.0).all()
    np.testing.assert_allclose(drawn, expected, atol=0.015)


@KERNELS
def test_choices_of_one_prompt_are_independent(kernel):
    logits = np.zeros((4000, 8))
    first = run_sample(kernel, logits, *requests(4000, choice=0))
    second = run_sample(kernel, logits, *requests(4000, choice=1))
    other_seed = run_sample(kernel, logits, *requests(4000, choice=0, seed_low=1))
    assert abs(np.mean(first == second) - 1 / 8) < 0.025
    assert abs(np.mean(first == other_seed) - 1 / 8) < 0.025
    np.testing.assert_array_equal(first, run_sample(kernel, logits, *requests(4000, choice=0)))


@KERNELS
def test_a_row_is_drawn_alone_as_in_a_batch(kernel):
    rng = np.random.default_rng(3)
    rows, width = 40, 9000
    logits = rng.standard_normal((rows, width)) * 2.0
    sampling, draw = requests(rows, temperature=rng.choice([0.0, 0.7, 1.0], rows), top_p=rng.choice([0.8, 1.0], rows))
    draw[:, op.TOP_K] = rng.choice([0, 40], rows)
    together = run_sample(kernel, logits, sampling, draw)
    for part in (slice(0, 1), slice(7, 8), slice(20, 37)):
        alone = run_sample(kernel, logits[part], sampling[part], draw[part])
        np.testing.assert_array_equal(alone, together[part])


@KERNELS
@pytest.mark.parametrize("width", (33, 4097, 20000))
def test_random_requests_are_drawn_as_the_reference_draws_them(kernel, width):
    rng = np.random.default_rng(width + 1)
    rows = 24
    sampling, draw = requests(
        rows, temperature=rng.choice([0.0, 0.3, 1.0, 1.7], rows), top_p=rng.choice([1.0, 0.97, 0.6, 0.1], rows),
        min_p=rng.choice([0.0, 0.02, 0.3], rows), presence=rng.choice([0.0, 0.5], rows),
        repetition=rng.choice([1.0, 1.25], rows), top_k=rng.choice([0, 1, 5, 300, width - 1], rows),
        flags=rng.integers(0, 8, rows), seed_low=rng.integers(0, 2**31, rows),
    )
    case = Sample(
        {"logits": op.in_bf16(rng.choice([0.3, 3.0], (rows, 1)) * rng.standard_normal((rows, width))),
         "sampling": sampling, "draw": draw, "row_places": rng.permutation(rows).astype(np.int32),
         "mask": rng.integers(-(2**31), 2**31, (rows, -(-width // 32))).astype(np.int32),
         "bias": rng.integers(-2, 3, (rows, width)).astype(np.float32)},
        {}, ({},),
        {"last_ids": np.zeros(rows, np.int32),
         "counts": (rng.integers(0, 3, (rows, width)) | op.IN_PROMPT * rng.integers(0, 2, (rows, width))).astype(np.int32)},
    )
    case = op.decided(case, rng)
    expected, _, expected_counts = op.reference_sample(case.inputs, {}, case.initial)
    inputs, counts = case.inputs, case.initial["counts"].copy()
    ids = run_sample(kernel, inputs["logits"], sampling, draw, inputs["row_places"], inputs["mask"], inputs["bias"], counts)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(counts, expected_counts)


@KERNELS
def test_penalties_and_counts(kernel):
    """The same token is taken until what it was generated outweighs its lead."""
    logits, counts = np.array([[2.0, 1.0, -1.0, 0.5]]), np.zeros((1, 4), np.int32)
    sampling, draw = requests(1, temperature=0.0, frequency=0.3, flags=op.PENALISED)
    taken = [int(run_sample(kernel, logits, sampling, draw, counts=counts)[0]) for _ in range(6)]
    assert taken == [0, 0, 0, 0, 1, 0] and counts.tolist() == [[5, 1, 0, 0]]
    counts[:] = [[op.IN_PROMPT, 0, op.IN_PROMPT, 0]]  # of the prompt: repetition only
    sampling, draw = requests(1, temperature=0.0, presence=100.0, repetition=3.0, flags=op.PENALISED)
    assert run_sample(kernel, logits, sampling, draw, counts=counts)[0] == 1
    assert counts.tolist() == [[op.IN_PROMPT, 1, op.IN_PROMPT, 0]]


@KERNELS
def test_a_row_that_cannot_be_drawn_leaves_the_others_alone(kernel):
    logits = np.zeros((4, 50))
    logits[:, 9] = 1.0
    logits[1] = np.nan
    mask = np.full((4, 2), -1, np.int32)
    mask[2] = 0
    sampling, draw = requests(4, temperature=0.0, flags=op.MASKED)
    places = np.array([0, 1, 2, -1], np.int32)
    assert run_sample(kernel, logits, sampling, draw, places, mask).tolist() == [9, -1, -1, -1]


# ---- banked_lora


def lora_operands(rng, tokens, width, out, rank, slots, dtype):
    def stored(shape, scale=1.0):
        values = (scale * rng.standard_normal(shape)).astype(np.float32)
        return values if dtype == "f32" else f32_to_bf16(values)

    return (stored((tokens, width)), stored((slots, rank, width), width**-0.5), stored((slots, out, rank)),
            rng.integers(-1, slots, tokens).astype(np.int32), stored((tokens, out)))


def run_lora(kernel, operands, dtype):
    x, a, b, slots, addend = operands
    y = np.zeros_like(addend)
    inputs = [(t, dtype, t.shape) for t in (x, a, b)] + [slots, (addend, dtype, addend.shape)]
    engine.run_op("banked_lora", inputs, [(y, dtype, y.shape)], {}, **kernel)
    return y


@pytest.mark.parametrize("kernel", choices("banked_lora"))
@pytest.mark.parametrize("dtype", ("f32", "bf16"))
@pytest.mark.parametrize("tokens, width, out, rank, slots", ((100, 1088, 72, 16, 3), (1100, 1032, 40, 128, 2)))
def test_a_token_has_the_same_bits_in_any_company(kernel, dtype, tokens, width, out, rank, slots):
    x, a, b, of_token, addend = lora_operands(np.random.default_rng(1), tokens, width, out, rank, slots, dtype)
    of_token[30:90] = 1
    together = run_lora(kernel, (x, a, b, of_token, addend), dtype)
    for part in (slice(0, 1), slice(3, 9), slice(20, 40), slice(25, 95), slice(5, 13)):
        alone = run_lora(kernel, (x[part], a, b, of_token[part], addend[part]), dtype)
        np.testing.assert_array_equal(alone, together[part])
    np.testing.assert_array_equal(together[of_token < 0], addend[of_token < 0])


@pytest.mark.parametrize("kernel", choices("banked_lora"))
def test_an_adapter_of_nan_harms_no_other(kernel):
    x, a, b, of_token, addend = lora_operands(np.random.default_rng(2), 40, 64, 32, 8, 2, "bf16")
    of_token[:] = np.arange(40) % 2
    a[1] = 0x7FC0
    y = run_lora(kernel, (x, a, b, of_token, addend), "bf16")
    nan = (y & 0x7FFF) > 0x7F80
    assert nan[1::2].all() and not nan[::2].any()


def test_a_slot_outside_the_bank_is_an_error():
    operands = lora_operands(np.random.default_rng(2), 4, 8, 8, 8, 2, "f32")
    operands[3][2] = 2
    with pytest.raises(engine.EngineError, match="adapter slot 2 of token 2 is outside the bank"):
        run_lora({"backend": "cpu"}, operands, "f32")


# ---- token_logprobs


@pytest.mark.parametrize("kernel", choices("token_logprobs"))
def test_log_probabilities_sum_to_one(kernel):
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((5, 20)).astype(np.float32) * 4.0
    _, draw = requests(5)
    draw[:, op.LOGPROBS], draw[:, op.TARGET] = 20, [3, -1, 0, 19, 7]
    draw[4, op.LOGPROBS] = -1
    logprob, ids, top = np.zeros(5, np.float32), np.zeros((5, 20), np.int32), np.zeros((5, 20), np.float32)
    sampled = np.full(5, 11, np.int32)
    engine.run_op("token_logprobs", [logits, sampled, draw], [logprob, ids, top], {}, **kernel)
    np.testing.assert_allclose(np.exp(top[:4]).sum(axis=1), 1.0, rtol=1e-5)
    assert (np.diff(top[:4], axis=1) <= 0.0).all() and (np.sort(ids[:4], axis=1) == np.arange(20)).all()
    for row, target in enumerate((3, 11, 0, 19)):
        assert logprob[row] == pytest.approx(top[row][ids[row] == target][0], abs=1e-5)
    assert logprob[4] == 0.0 and (ids[4] == -1).all() and (top[4] == 0.0).all()


def test_the_places_of_a_bank_are_checked_by_shape():
    record = ops.get("sample")
    case = record.samples(np.random.default_rng(0))[0]
    types = [ops.TensorType(case.inputs[o.name].shape, "f32") if o.name in case.inputs else None for o in record.inputs]
    with pytest.raises(ValueError, match="row_places must have shape"):
        record.infer([*types[:3], ops.TensorType((9,), "i32"), *types[4:]], {})
