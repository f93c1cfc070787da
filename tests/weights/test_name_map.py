"""Name maps: importing and exporting undo each other, whatever the sizes and formats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_core.errors import WeightError
from surogate_core.weights.name_map import NameMap, Rule
from surogate_core.weights.tensor import LazyTensor, StoredTensor, from_f32
from surogate_core.weights.transforms import AddOne, Chain, Fuse, PermuteRope, Split, Stack, Transpose


class MemoryStore(dict):
    """A store of tensors in memory."""

    def get(self, name):
        return self[name]

    def names(self):
        return list(self)

    def missing(self, name):
        return f"memory has no tensor {name!r}"


def llama_like(heads: int, kv_heads: int, head_dim: int, inner: int, experts: int) -> NameMap:
    layer, file = "layers.{layer}.", "blk.{layer}."
    return NameMap(
        [
            Rule("embed.weight", "token_embd.weight"),
            Rule(layer + "attn.q.weight", file + "attn_q.weight", PermuteRope(heads, head_dim)),
            Rule(layer + "attn.q.bias", file + "attn_q.bias", PermuteRope(heads, head_dim), optional=True),
            Rule(layer + "attn.k.weight", file + "attn_k.weight", PermuteRope(kv_heads, head_dim)),
            Rule(layer + "attn_norm.weight", file + "attn_norm.weight", AddOne()),
            Rule(
                (layer + "mlp.gate.weight", layer + "mlp.up.weight"), file + "gate_up.weight", Split(0, (inner, inner))
            ),
            Rule(layer + "mlp.both.weight", (file + "x.weight", file + "y.weight"), Fuse(0, (inner, 2 * inner))),
            Rule(layer + "conv.weight", file + "conv.weight", Transpose()),
            Rule(layer + "experts.down.weight", file + "experts.{expert}.down.weight", Stack(experts)),
            Rule(layer + "experts.t.weight", file + "experts.{expert}.t.weight", Chain(Stack(experts))),
            Rule("lm_head.weight", "output.weight"),
        ],
        tied={"lm_head.weight": "embed.weight"},
    )


def params_of(name_map: NameMap, layers: int) -> list[str]:
    patterns = [pattern for rule in name_map.rules for pattern in rule.params]
    return [p.replace("{layer}", str(i)) for p in patterns for i in (range(layers) if "{layer}" in p else [0])]


def same(a: StoredTensor, b: StoredTensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and np.array_equal(a.read(), b.read())


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 4, 6, 64]), st.integers(1, 5), st.integers(1, 4),
    st.integers(1, 3), st.sampled_from(["f32", "bf16", "q8_0", "q4_1", "q4_k"]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_file_to_params_to_file_is_the_identity(heads, kv_heads, head_dim, inner, experts, layers, dtype, tied, biased):
    rng = np.random.default_rng(0)
    name_map = llama_like(heads, kv_heads, head_dim, inner, experts)
    width = 256

    def tensor(name, *shape, form=dtype):
        return from_f32(name, rng.normal(size=shape).astype(np.float32), form)

    tensors = [tensor("token_embd.weight", 11, width)] + ([] if tied else [tensor("output.weight", 11, width)])
    for i in range(layers):
        blk = f"blk.{i}."
        tensors += [
            tensor(blk + "attn_q.weight", heads * head_dim, width),
            tensor(blk + "attn_k.weight", kv_heads * head_dim, width),
            from_f32(blk + "attn_norm.weight", rng.integers(-8, 8, width).astype(np.float32) / 4),
            tensor(blk + "gate_up.weight", 2 * inner, width),
            tensor(blk + "x.weight", inner, width),
            tensor(blk + "y.weight", 2 * inner, width),
            tensor(blk + "conv.weight", 3, 5, form="f32"),
        ]
        tensors += [tensor(f"{blk}experts.{e}.{n}.weight", 2, width) for e in range(experts) for n in ("down", "t")]
        tensors += [tensor(blk + "attn_q.bias", heads * head_dim, form="f32")] if biased else []
    store = MemoryStore({each.name: each for each in tensors})

    resolved = name_map.resolve(store, params_of(name_map, layers))
    assert any("bias" in param for param in resolved) == biased
    assert name_map.unused(store, resolved) == []
    loaded = {param: name_map.load(store, param) for param in resolved}
    assert all(tensor.name == param for param, tensor in loaded.items())
    if tied:
        loaded["lm_head.weight"] = loaded["embed.weight"]
    exported = name_map.export(loaded)
    assert set(exported) == set(store)
    for name, tensor in exported.items():
        assert tensor.name == name
        assert same(tensor, store[name]), name
        assert (tensor.dtype, tensor.shape) == (store[name].dtype, store[name].shape)
    for name in store:
        for param in name_map.param_names(name):
            assert name in name_map.file_names(param)


def test_rope_rows_go_from_interleaved_to_halves():
    heads, head_dim = 2, 4
    rows = np.arange(8, dtype=np.float32)[:, None] * np.ones((1, 32), np.float32)
    store = MemoryStore({"blk.0.attn_q.weight": from_f32("q", rows)})
    name_map = NameMap(
        [Rule("layers.{layer}.attn.q.weight", "blk.{layer}.attn_q.weight", PermuteRope(heads, head_dim))]
    )
    loaded = name_map.load(store, "layers.0.attn.q.weight")
    assert loaded.data[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_permuting_quantised_rows_equals_permuting_decoded_ones():
    values = np.random.default_rng(0).normal(size=(12, 64)).astype(np.float32)
    permute = PermuteRope(2, 6)
    packed = permute.load([from_f32("w", values, "q4_1")])[0]
    plain = permute.load([StoredTensor("w", "f32", (12, 64), from_f32("w", values, "q4_1").to_f32())])[0]
    np.testing.assert_array_equal(packed.to_f32(), plain.data)


def test_a_split_of_columns_keeps_blocks_whole_or_refuses():
    tensor = from_f32("w", np.random.default_rng(0).normal(size=(3, 96)).astype(np.float32), "q8_0")
    left, right = Split(1, (32, 64)).load([tensor])
    np.testing.assert_array_equal(np.concatenate([left.to_f32(), right.to_f32()], axis=1), tensor.to_f32())
    assert same(Split(1, (32, 64)).export([left, right])[0], tensor)
    with pytest.raises(WeightError, match="cut through q8_0 blocks of 32"):
        Split(1, (16, 80)).load([tensor])


def test_export_is_lazy_and_makes_each_group_once():
    made = []

    def make():
        made.append(1)
        return np.zeros((6, 4), np.float32)

    name_map = NameMap([Rule("a", ("x", "y"), Fuse(0, (2, 4)))])
    exported = name_map.export({"a": LazyTensor("a", "f32", (6, 4), make)})
    assert not made and exported["y"].shape == (4, 4)
    assert exported["x"].read().shape == (2, 4) and exported["y"].read().shape == (4, 4)
    assert len(made) == 1


def test_a_tied_head_is_left_out_only_when_it_is_the_embedding():
    name_map = NameMap([Rule("e", "embd"), Rule("h", "out")], tied={"h": "e"})
    one, two = from_f32("e", np.ones((2, 2), np.float32)), from_f32("h", np.ones((2, 2), np.float32))
    assert list(name_map.export({"e": one, "h": one})) == ["embd"]
    assert list(name_map.export({"e": one, "h": two})) == ["embd", "out"]
    assert name_map.load(MemoryStore(embd=one), "h").name == "h"


def test_errors_name_the_tensor_and_what_to_do():
    name_map = llama_like(2, 1, 4, 3, 2)
    with pytest.raises(WeightError, match=r"no rule for parameter 'layers.0.attn.v.weight'; nearest rules: layers"):
        name_map.file_names("layers.0.attn.v.weight")
    with pytest.raises(
        WeightError, match=r"no tensor 'token_embd.weight'; and 2 more: blk.0.attn_q.weight, blk.0.attn_k.weight"
    ):
        name_map.resolve(MemoryStore(), ["embed.weight", "layers.0.attn.q.weight", "layers.0.attn.k.weight"])
    with pytest.raises(WeightError, match="no tensor 'blk.3.attn_q.bias'"):
        name_map.load(MemoryStore(), "layers.3.attn.q.bias")
    store = MemoryStore({"blk.0.attn_q.weight": from_f32("blk.0.attn_q.weight", np.ones((6, 4), np.float32))})
    with pytest.raises(WeightError, match="'blk.0.attn_q.weight' has 6 rows, but 2 heads of 4 need 8"):
        name_map.load(store, "layers.0.attn.q.weight")
    embed = MemoryStore({"token_embd.weight": from_f32("t", np.ones((6, 4), np.float32))})
    with pytest.raises(WeightError, match=r"the shape \[6, 4\], but its configuration asks for \[6, 8\]"):
        name_map.load(embed, "embed.weight", shape=(6, 8))
    with pytest.raises(WeightError, match="also holds 'layers.0.mlp.up.weight'"):
        name_map.export({"layers.0.mlp.gate.weight": from_f32("g", np.ones((3, 4), np.float32))})
    assert name_map.param_names("blk.0.nonsense") == []
    assert name_map.param_names("blk.01.attn_q.weight") == []  # a number has one spelling


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Rule("a.{i}", "b"), "placeholders"),
        (lambda: Rule("a", "b.{i}.{j}", Stack(2)), "placeholders"),
        (lambda: Rule(("a.{i}", "b"), "c.{i}", Split(0, (1, 1))), "same placeholders"),
        (lambda: Rule("a", "b", Split(0, (1, 1))), "makes 2 parameters of 1 tensors"),
        (lambda: NameMap([Rule("a", "b"), Rule("a", "c")]), "'a' has two rules"),
    ],
)
def test_maps_that_make_no_sense_are_refused(make, message):
    with pytest.raises(WeightError, match=message):
        make()


def test_what_cannot_be_stacked_joined_or_transposed():
    one, two = from_f32("one", np.ones((2, 32), np.float32), "q8_0"), from_f32("two", np.ones((2, 32), np.float32))
    with pytest.raises(WeightError, match="'one' .* and 'two' .* cannot be stacked"):
        Stack(2).load([one, two])
    with pytest.raises(WeightError, match="convert them to one format"):
        Fuse(0, (2, 2)).load([one, two])
    with pytest.raises(WeightError, match="cannot be transposed"):
        Transpose().load([one])
    with pytest.raises(WeightError, match="cannot be cut"):
        Split(0, (1, 2)).load([two])
