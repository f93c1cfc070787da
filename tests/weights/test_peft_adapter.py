"""LoRA adapters: PEFT loads ours, we load PEFT's, and what cannot be applied is refused by name."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from surogate_core.errors import WeightError
from surogate_core.weights.export import write_hf
from surogate_core.weights.name_map import NameMap, Rule
from surogate_core.weights.peft_adapter import Adapter, LoraPair, read_adapter, write_adapter
from surogate_core.weights.safetensors_file import SafetensorsFile, write_file
from surogate_core.weights.tensor import from_f32
from surogate_core.weights.transforms import Split


def pair(tiny, param: str, rank: int = 4, scale: float = 2.0, seed: int = 0) -> LoraPair:
    out_features, in_features = tiny.shapes()[param]
    rng = np.random.default_rng(seed)
    a = rng.normal(0, 0.1, (rank, in_features)).astype(np.float32)
    return LoraPair(a, rng.normal(0, 0.1, (out_features, rank)).astype(np.float32), scale)


@pytest.fixture
def adapter(tiny) -> Adapter:
    names = [f"layers.{i}.{name}.weight" for i in range(tiny.layers) for name in ("attn.q", "mlp.down")]
    return Adapter({name: pair(tiny, name, seed=i) for i, name in enumerate(names)}, base_model="tiny", dropout=0.05)


def written_config(folder) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


def assert_same(a: Adapter, b: Adapter) -> None:
    assert set(a.pairs) == set(b.pairs)
    for name, one in a.pairs.items():
        np.testing.assert_array_equal(one.a, b.pairs[name].a)
        np.testing.assert_array_equal(one.b, b.pairs[name].b)
        assert one.scale == pytest.approx(b.pairs[name].scale, rel=1e-12)


def test_a_round_trip_keeps_everything(tiny, adapter, tmp_path):
    write_adapter(tmp_path, adapter, tiny.hf_map, tiny.layers)
    again = read_adapter(tmp_path, tiny.hf_map)
    assert_same(adapter, again)
    assert (again.base_model, again.dropout, again.use_rslora) == ("tiny", 0.05, False)
    config = written_config(tmp_path)
    assert config["target_modules"] == ["down_proj", "q_proj"] and (config["r"], config["lora_alpha"]) == (4, 8)
    names = SafetensorsFile(tmp_path / "adapter_model.safetensors").names()
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names


def test_ranks_and_scales_of_single_modules_become_patterns(tiny, adapter, tmp_path):
    adapter.pairs["layers.1.attn.q.weight"] = pair(tiny, "layers.1.attn.q.weight", rank=2, scale=1.25)
    write_adapter(tmp_path, adapter, tiny.hf_map, tiny.layers)
    assert_same(adapter, read_adapter(tmp_path, tiny.hf_map))
    assert list(written_config(tmp_path)["rank_pattern"].values()) == [2]
    assert list(written_config(tmp_path)["alpha_pattern"].values()) == [2.5]


def test_a_kind_of_module_that_agrees_gets_one_pattern(tiny, adapter, tmp_path):
    for i in range(tiny.layers):
        adapter.pairs[f"layers.{i}.attn.k.weight"] = pair(tiny, f"layers.{i}.attn.k.weight", rank=3, scale=1.0)
    write_adapter(tmp_path, adapter, tiny.hf_map, tiny.layers)
    assert written_config(tmp_path)["rank_pattern"] == {"k_proj": 3}
    assert written_config(tmp_path)["alpha_pattern"] == {"k_proj": 3}
    assert_same(adapter, read_adapter(tmp_path, tiny.hf_map))


def test_rslora_scales_by_the_root_of_the_rank(tiny, adapter, tmp_path):
    scaled = Adapter(
        {name: LoraPair(p.a, p.b, 16 / math.sqrt(4)) for name, p in adapter.pairs.items()}, use_rslora=True
    )
    write_adapter(tmp_path, scaled, tiny.hf_map, tiny.layers)
    assert written_config(tmp_path)["lora_alpha"] == 16 and written_config(tmp_path)["use_rslora"] is True
    assert_same(scaled, read_adapter(tmp_path, tiny.hf_map))


def test_modules_are_named_in_full_when_a_layer_is_left_out(tiny, adapter, tmp_path):
    del adapter.pairs["layers.1.mlp.down.weight"]
    write_adapter(tmp_path, adapter, tiny.hf_map, tiny.layers)
    assert "model.layers.0.mlp.down_proj" in written_config(tmp_path)["target_modules"]
    only_first = Adapter({name: p for name, p in adapter.pairs.items() if ".0." in name})
    write_adapter(tmp_path, only_first, tiny.hf_map, tiny.layers)
    assert written_config(tmp_path)["target_modules"] == [
        "model.layers.0.mlp.down_proj",
        "model.layers.0.self_attn.q_proj",
    ]


CHANGES = [
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    ({"use_dora": True}, "use_dora is True: DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"init_lora_weights": "pissa"}, "'pissa', which also changes the base weights"),
    ({"from_the_future": 3}, "from_the_future is 3, which this version does not know"),
    ({"r": 8}, r"lora_A \[4, 96\] .* gives it rank 8"),
    ({"r": 0}, "r or rank_pattern has 0"),
    ({"r": None}, "r or rank_pattern has None"),
    ({"lora_alpha": "8"}, "lora_alpha or alpha_pattern has '8'"),
    ({"rank_pattern": {"(": 4}}, "not a regular expression"),
    ({"rank_pattern": [4]}, "not an object"),
]


@pytest.mark.parametrize("change,message", CHANGES)
def test_what_cannot_be_applied_is_refused(tiny, adapter, tmp_path, change, message):
    write_adapter(tmp_path, adapter, tiny.hf_map, tiny.layers)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**written_config(tmp_path), **change}))
    with pytest.raises(WeightError, match=message):
        read_adapter(tmp_path, tiny.hf_map)


def test_unknown_keys_at_their_default_are_ignored(tiny, adapter, tmp_path):
    write_adapter(tmp_path, adapter, tiny.hf_map, tiny.layers)
    more = {"from_the_future": False, "another": None, "modules_to_save": [], "layers_pattern": None, "third": {}}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**written_config(tmp_path), **more}))
    assert_same(adapter, read_adapter(tmp_path, tiny.hf_map))


@pytest.mark.parametrize(
    "edit,message",
    [
        (lambda t: t[:-1], "has no lora_B; the adapter is not whole"),
        (lambda t: [*t, from_f32("lm_head.weight", t[0].data)], "'lm_head.weight' is not of the form"),
        (lambda t: [each.renamed(each.name.replace("q_proj", "c_attn")) for each in t], "c_attn' is not one of"),
        (lambda t: [], "holds no LoRA tensors"),
    ],
)
def test_damaged_weights_are_refused(tiny, adapter, tmp_path, edit, message):
    write_adapter(tmp_path, adapter, tiny.hf_map, tiny.layers)
    path = tmp_path / "adapter_model.safetensors"
    file = SafetensorsFile(path)
    tensors = [from_f32(name, file.get(name).data.copy()) for name in sorted(file.names())]
    write_file(path, edit(tensors))
    with pytest.raises(WeightError, match=message):
        read_adapter(tmp_path, tiny.hf_map)


def test_missing_files_are_named(tiny, adapter, tmp_path):
    with pytest.raises(WeightError, match="has no adapter_config.json"):
        read_adapter(tmp_path, tiny.hf_map)
    write_adapter(tmp_path, adapter, tiny.hf_map, tiny.layers)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(WeightError, match="pickled and is never loaded"):
        read_adapter(tmp_path, tiny.hf_map)


def test_a_parameter_that_is_part_of_a_fused_tensor_has_no_adapter_file(tmp_path):
    fused = NameMap([Rule(("q.weight", "k.weight"), "qk.weight", Split(0, (2, 2)))])
    one = LoraPair(np.ones((1, 3), np.float32), np.ones((2, 1), np.float32), 1.0)
    with pytest.raises(WeightError, match="'q.weight' is no module of its own"):
        write_adapter(tmp_path, Adapter({"q.weight": one}), fused, 1)


def test_an_empty_adapter_is_not_written(tiny, tmp_path):
    with pytest.raises(WeightError, match="no LoRA pair"):
        write_adapter(tmp_path, Adapter({}), tiny.hf_map, tiny.layers)


def test_peft_and_we_read_each_other(tiny, tmp_path):
    torch = pytest.importorskip("torch", reason="the comparison with PEFT needs torch")
    transformers = pytest.importorskip("transformers", reason="the comparison with PEFT needs transformers")
    peft = pytest.importorskip("peft", reason="the comparison with PEFT needs it")
    write_hf(tmp_path / "base", tiny.hf_map.export(tiny.params()), tiny.config(), dtype="f32")
    load = transformers.AutoModelForCausalLM.from_pretrained
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM",
        rank_pattern={"layers.1.self_attn.q_proj": 2}, alpha_pattern={"down_proj": 5},
    )  # fmt: skip
    theirs = peft.get_peft_model(load(tmp_path / "base", dtype=torch.float32), config)
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "theirs")

    adapter = read_adapter(tmp_path / "theirs", tiny.hf_map)
    for param, ours in adapter.pairs.items():
        module = theirs.get_submodule("base_model.model." + tiny.hf_map.file_names(param)[0].removesuffix(".weight"))
        expected = module.get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(ours.delta(), expected, rtol=1e-5, atol=1e-6)
    assert {ours.rank for ours in adapter.pairs.values()} == {2, 4}

    write_adapter(tmp_path / "ours", adapter, tiny.hf_map, tiny.layers)
    again = peft.PeftModel.from_pretrained(load(tmp_path / "base", dtype=torch.float32), tmp_path / "ours")
    ids = torch.arange(10)[None]
    with torch.no_grad():
        difference = (again(ids).logits - theirs(ids).logits).abs().max()
    assert difference < 1e-5
    assert "lora" not in str(set(again.state_dict()) ^ set(theirs.state_dict()))
