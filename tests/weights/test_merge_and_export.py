"""Merging and writing whole models: what went in, exactly once, is what comes out of the files."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest

from surogate_core.errors import WeightError
from surogate_core.weights.export import write_gguf, write_hf
from surogate_core.weights.merge import Merge
from surogate_core.weights.peft_adapter import Adapter, LoraPair
from surogate_core.weights.quants import f32_to_bf16
from surogate_core.weights.store import WeightStore
from surogate_core.weights.tensor import from_f32

METADATA = {"general.architecture": "llama", "llama.block_count": 2}


def adapter_of(tiny, *names: str, scale: float = 0.5) -> Adapter:
    rng = np.random.default_rng(5)
    pairs = {}
    for name in names:
        rows, columns = tiny.shapes()[name]
        a, b = rng.normal(size=(2, columns)).astype(np.float32), rng.normal(size=(rows, 2)).astype(np.float32)
        pairs[name] = LoraPair(a, b, scale)
    return Adapter(pairs)


ADAPTED = ("layers.0.attn.q.weight", "layers.1.mlp.down.weight")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0", "q4_1"])
def test_a_merge_decodes_adds_and_rounds_once(tiny, tmp_path, dtype):
    base, adapter = tiny.params(dtype=dtype), adapter_of(tiny, *ADAPTED)
    merge = Merge(base.__getitem__, base, adapter)
    write_hf(tmp_path, tiny.hf_map.export(merge.tensors()), tiny.config(), dtype="bf16")
    report = merge.check()
    assert report.num_pairs == 2 and 0.99 * report.total < report.changed <= report.total
    store = WeightStore.open(tmp_path)
    for name, tensor in base.items():
        expected = tensor.to_f32()
        if name in adapter.pairs:
            expected = expected + adapter.pairs[name].delta()
        np.testing.assert_array_equal(tiny.hf_map.load(store, name).data, f32_to_bf16(expected), err_msg=name)


def test_a_merge_counts_each_pair(tiny):
    base, adapter = tiny.params(), adapter_of(tiny, *ADAPTED)
    merge = Merge(base.__getitem__, base, adapter)
    tensors = merge.tensors()
    with pytest.raises(WeightError, match=r"'layers.0.attn.q.weight' was applied 0 times, not once \(2 such pairs\)"):
        merge.check()
    for name in ADAPTED:
        tensors[name].read()
    assert merge.check().num_pairs == 2
    tensors[ADAPTED[0]].read()
    with pytest.raises(WeightError, match="applied 2 times"):
        merge.check()
    for tensor in merge.tensors().values():
        tensor.read()
    assert merge.check().num_pairs == 2


def test_a_merge_that_changes_nothing_is_an_error(tiny):
    base = tiny.params()
    with pytest.raises(WeightError, match="equal the base"):
        Merge(base.__getitem__, base, adapter_of(tiny, *ADAPTED, scale=0.0))
    merge = Merge(base.__getitem__, base, adapter_of(tiny, *ADAPTED, scale=1e-30))  # lost in rounding
    for tensor in merge.tensors().values():
        tensor.read()
    with pytest.raises(WeightError, match="equal the base"):
        merge.check()


def test_an_adapter_of_another_model_is_refused(tiny):
    base = tiny.params()
    stray = Adapter({"layers.7.attn.q.weight": adapter_of(tiny, *ADAPTED).pairs[ADAPTED[0]]})
    with pytest.raises(WeightError, match="'layers.7.attn.q.weight', which the base model does not have"):
        Merge(base.__getitem__, base, stray)
    wrong = Adapter({"layers.0.attn.k.weight": adapter_of(tiny, *ADAPTED).pairs[ADAPTED[0]]})
    with pytest.raises(WeightError, match=r"weight of \[64, 64\], but the base has \[32, 64\]"):
        Merge(base.__getitem__, base, wrong)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_hf_to_ours_to_hf_is_the_identity(tiny, tmp_path, dtype, tied):
    tiny.tied = tied
    write_hf(tmp_path / "one", tiny.hf_map.export(tiny.params()), tiny.config(), {"eos_token_id": [1, 2]}, dtype=dtype)
    store = WeightStore.open(tmp_path / "one")
    params = {name: tiny.hf_map.load(store, name, shape) for name, shape in tiny.shapes().items()}
    assert tiny.hf_map.unused(store, params) == []
    write_hf(tmp_path / "two", tiny.hf_map.export(params), store.config, {"eos_token_id": [1, 2]}, dtype=dtype)
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_hf_to_gguf_to_hf_is_the_identity(tiny, tmp_path):
    write_hf(tmp_path / "one", tiny.hf_map.export(tiny.params()), tiny.config(), dtype="f32")
    store = WeightStore.open(tmp_path / "one")
    write_gguf(
        tmp_path / "x.gguf",
        tiny.gguf_map.export({name: tiny.hf_map.load(store, name) for name in tiny.shapes()}),
        METADATA,
        dtype="f32",
    )
    middle = WeightStore.open(tmp_path / "x.gguf")
    params = {name: tiny.gguf_map.load(middle, name) for name in tiny.shapes()}
    write_hf(tmp_path / "two", tiny.hf_map.export(params), tiny.config(), dtype="f32")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    q = "layers.0.attn.q.weight"
    assert not np.array_equal(middle.get("blk.0.attn_q.weight").data, params[q].data)  # rows really are reordered


def test_transformers_loads_what_is_written(tiny, tmp_path):
    torch = pytest.importorskip("torch", reason="loading with transformers needs torch")
    transformers = pytest.importorskip("transformers", reason="loading with transformers needs it")
    params = tiny.params()
    write_hf(tmp_path, tiny.hf_map.export(params), tiny.config(), dtype="f32", max_shard_bytes=40_000)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == torch.float32
    for name, tensor in params.items():
        theirs = model.get_parameter(tiny.hf_map.file_names(name)[0]).detach().numpy()
        np.testing.assert_array_equal(theirs, tensor.data)


@pytest.mark.parametrize("dtype,code", [("f32", 0), ("f16", 1), ("bf16", 32), ("q8_0", 7), ("q4_0", 2), ("q4_1", 3)])
def test_a_gguf_has_the_formats_asked_for(tiny, tmp_path, dtype, code):
    formats = write_gguf(tmp_path / "x.gguf", tiny.gguf_map.export(tiny.params()), METADATA, dtype=dtype)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert {tensor.name: tensor.tensor_type.name.lower() for tensor in reader.tensors} == formats
    assert formats["blk.0.attn_norm.weight"] == "f32" and formats["blk.1.ffn_down.weight"] == dtype
    assert formats["token_embd.weight"] == ("q8_0" if dtype.startswith("q") else dtype)
    assert reader.get_field("general.file_type").contents() == code
    assert (reader.get_field("general.quantization_version") is not None) == dtype.startswith("q")


def test_rows_that_are_not_whole_blocks_get_a_format_that_fits(tmp_path):
    values = np.ones((4, 96), np.float32)
    tensors = {
        "a": from_f32("a", values),
        "b": from_f32("b", values[:, :33]),
        "c": from_f32("c", np.ones((2, 256), np.float32)),
    }
    assert write_gguf(tmp_path / "x.gguf", tensors, METADATA, dtype="q4_k") == {"a": "q8_0", "b": "f16", "c": "q4_k"}


def test_without_a_dtype_every_matrix_keeps_its_format(tiny, tmp_path):
    params = tiny.params(dtype="q4_1")
    write_gguf(tmp_path / "x.gguf", tiny.gguf_map.export(params), METADATA, dtype=None)
    store = WeightStore.open(tmp_path / "x.gguf")
    assert store.config["general.file_type"] == 3
    for name, tensor in params.items():
        again = tiny.gguf_map.load(store, name)
        assert again.dtype == tensor.dtype
        np.testing.assert_array_equal(again.data, tensor.data)


def test_formats_that_do_not_exist_are_refused(tiny, tmp_path):
    with pytest.raises(WeightError, match="choose one of bf16, f16, f32"):
        write_hf(tmp_path, tiny.hf_map.export(tiny.params()), tiny.config(), dtype="q8_0")
    with pytest.raises(WeightError, match="cannot be written in 'q9'; choose one of f32"):
        write_gguf(tmp_path / "x.gguf", {}, METADATA, dtype="q9")


def test_the_configuration_is_written_last(tiny, tmp_path):
    broken = {**tiny.hf_map.export(tiny.params())}
    broken["x"] = from_f32("x", np.full((2, 2), 1e9, np.float32))
    with pytest.raises(WeightError, match="65504"):
        write_hf(tmp_path, broken, tiny.config(), dtype="f16")
    assert list(tmp_path.iterdir()) == []


def test_the_dtype_is_in_config_json_for_old_and_new_readers(tiny, tmp_path):
    write_hf(tmp_path, tiny.hf_map.export(tiny.params()), {**tiny.config(), "torch_dtype": "float32"}, dtype="bf16")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_a_family_without_gguf_says_so():
    from surogate_core.dsl import Family

    class Plain(Family):
        name = "plain"
        from_hf = model = hf_names = hf_config = lambda self, given: None

    for method in (Plain().from_gguf, Plain().gguf_names, Plain().gguf_metadata):
        with pytest.raises(WeightError, match="family plain .* GGUF files"):
            method(None)
