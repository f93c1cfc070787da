"""The references themselves, against implementations that are not ours."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import ops
from surogate_core.ops.dropout import philox

RNG = np.random.default_rng(5)


def outputs(name: str, inputs: dict, attrs: dict | None = None, initial: dict | None = None) -> list[np.ndarray]:
    record = ops.get(name)
    operands = {o.name: inputs.get(o.name) for o in record.inputs}
    return record.reference(operands, record.complete_attrs(attrs or {}), initial or {})


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed (extra `test`)")


def as_torch(torch, array, grad=False):
    return torch.tensor(array, dtype=torch.float64, requires_grad=grad)


def test_philox_known_answers():
    """The vectors that the authors of the generator publish with it (philox4x32-10)."""
    zeros = philox(np.zeros(1, np.uint64), 0, np.zeros(2, np.int64))[0]
    assert [hex(word) for word in zeros] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def test_dropout_keeps_the_share_it_should():
    y = outputs("dropout", {"x": np.ones(200_000), "seed": np.array([1, 2])}, {"p": 0.3, "stream_id": 4})[0]
    assert abs(np.mean(y == 0) - 0.3) < 0.005
    assert np.allclose(y[y != 0], 1 / 0.7)
    other = outputs("dropout", {"x": np.ones(200_000), "seed": np.array([1, 2])}, {"p": 0.3, "stream_id": 5})[0]
    assert 0.05 < np.mean((y == 0) & (other == 0)) < 0.13  # independent: 0.09


def test_rms_norm(torch):
    x, weight = RNG.standard_normal((7, 12)), RNG.standard_normal(12)
    expected = torch.nn.functional.rms_norm(as_torch(torch, x), (12,), as_torch(torch, weight), eps=1e-5)
    np.testing.assert_allclose(outputs("rms_norm", {"x": x, "weight": weight}, {"eps": 1e-5})[0], expected, rtol=1e-12)
    shifted = outputs("rms_norm", {"x": x, "weight": weight - 1.0}, {"eps": 1e-5, "unit_offset": 1.0})[0]
    np.testing.assert_allclose(shifted, expected, rtol=1e-9)


@pytest.mark.parametrize("name", ("silu", "gelu_tanh", "gelu"))
def test_glu_and_its_gradient(torch, name):
    functional = torch.nn.functional
    activation = {
        "silu": functional.silu, "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }[name]
    gate, up, dh = (4.0 * RNG.standard_normal((5, 9)) for _ in range(3))
    tg, tu = as_torch(torch, gate, True), as_torch(torch, up, True)
    h = activation(tg) * tu
    h.backward(as_torch(torch, dh))
    got = outputs("glu", {"gate": gate, "up": up}, {"activation": name})[0]
    np.testing.assert_allclose(got, h.detach(), rtol=1e-9, atol=1e-13)
    grads = outputs("glu_grad", {"dh": dh, "gate": gate, "up": up}, {"activation": name})
    np.testing.assert_allclose(grads[0], tg.grad, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(grads[1], tu.grad, rtol=1e-9, atol=1e-13)


def test_rope(torch):
    llama = pytest.importorskip(
        "transformers.models.llama.modeling_llama", reason="transformers is not installed (extra `test`)"
    )
    x, positions = RNG.standard_normal((6, 3, 8)), np.array([0, 1, 2, 0, 1, 9])
    angles = positions[:, None] / 10000.0 ** (np.arange(4) / 4)
    cos, sin = (as_torch(torch, np.tile(f(angles), 2))[None] for f in (np.cos, np.sin))
    heads = as_torch(torch, x).transpose(0, 1)[None]
    expected = llama.apply_rotary_pos_emb(heads, heads, cos, sin)[0][0].transpose(0, 1)
    steps = np.arange(16)[:, None] / 10000.0 ** (np.arange(4) / 4)
    table = np.stack([np.cos(steps), np.sin(steps)], axis=-1)
    inputs = {"positions": positions, "table": table}
    y = outputs("rope", {"x": x, **inputs})[0]
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(outputs("rope", {"x": y, **inputs}, {"inverse": 1})[0], x, rtol=1e-12, atol=1e-12)
    # Interleaved pairs are halves in another order.
    order = np.arange(8).reshape(2, 4).T.reshape(-1)
    mixed = outputs("rope", {"x": x[..., order], **inputs}, {"interleaved": 1})[0]
    np.testing.assert_allclose(mixed, y[..., order], rtol=1e-12)


def test_adamw_with_clipping_over_three_steps(torch):
    start = RNG.standard_normal(50)
    state = {"param": start, "m": np.zeros(50), "v": np.zeros(50)}
    param = torch.nn.Parameter(as_torch(torch, start))
    optimizer = torch.optim.AdamW([param], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in (1, 2, 3):
        grad = RNG.standard_normal(50) * step
        param.grad = as_torch(torch, grad)
        total = torch.nn.utils.clip_grad_norm_([param], 5.0)
        optimizer.step()
        norm = outputs("global_norm", {"grad": grad})[0]
        np.testing.assert_allclose(norm[0], total, rtol=1e-12)
        inputs = {"grad": grad, "norm": norm, "hyper": np.array([0.01, step, 0.0, 0.0])}
        attrs = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 5.0}
        state = dict(zip(("param", "m", "v"), outputs("adamw", inputs, attrs, state)))
        np.testing.assert_allclose(state["param"], param.detach(), rtol=1e-10)


def test_linear_cross_entropy(torch):
    x, weight, targets = RNG.standard_normal((6, 5)), RNG.standard_normal((11, 5)), np.array([0, 10, -100, 3, 3, 7])
    logits = as_torch(torch, x) @ as_torch(torch, weight).T
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="none", ignore_index=-100)
    got = outputs("linear_cross_entropy", {"x": x, "weight": weight, "targets": targets})[0]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_attention_of_two_documents(torch):
    q, k, v = RNG.standard_normal((7, 4, 8)), RNG.standard_normal((7, 2, 8)), RNG.standard_normal((7, 2, 8))
    inputs = {"q": q, "k": k, "v": v, "doc_starts": np.array([0, 3, 7, 7], np.int32)}
    got = outputs("attention", inputs, {"scale": 0.3})[0]
    for begin, end in ((0, 3), (3, 7)):
        parts = (as_torch(torch, x[begin:end]).transpose(0, 1)[None] for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=0.3, enable_gqa=True)
        np.testing.assert_allclose(got[begin:end], expected[0].transpose(0, 1), rtol=1e-10, atol=1e-12)


def test_attention_that_sees_as_far_ahead_as_back(torch):
    q, k, v = RNG.standard_normal((9, 4, 8)), RNG.standard_normal((9, 2, 8)), RNG.standard_normal((9, 2, 8))
    inputs = {"q": q, "k": k, "v": v, "doc_starts": np.array([0, 9, 9], np.int32)}
    at = np.arange(9)
    for window, mask in ((0, None), (3, torch.from_numpy(abs(at[:, None] - at) < 3))):
        parts = (as_torch(torch, x).transpose(0, 1)[None] for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*parts, mask, scale=0.3, enable_gqa=True)
        got = outputs("attention", inputs, {"scale": 0.3, "causal": 0, "window": window})[0]
        np.testing.assert_allclose(got, expected[0].transpose(0, 1), rtol=1e-10, atol=1e-12)
