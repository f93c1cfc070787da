"""Gemma 4 beyond what the parity suite asks of its variants: spellings of its files, what is refused, whole-model runs, and
serving."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from surogate_core.config import TrainConfig
from surogate_core.errors import WeightError
from surogate_core.export import export, open_installed
from surogate_core.generate import Decoder
from surogate_core.model import AppliedAdapter, FrozenWeights, LoadedModel
from surogate_core.passes.precision import RECIPES
from surogate_core.testing.parity import Parity, document_ranges, packed_batch, relative_error
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_core.train.run import run_training
from surogate_core.weights.peft_adapter import Adapter, LoraPair, write_adapter
from surogate_core.weights.safetensors_file import open_folder
from surogate_core.weights.tensor import realized
from surogate_gemma.gemma4 import FAMILIES
from surogate_gemma.gemma4_tiny import SHARED, UNIFIED

WHY = "compares with transformers: pip install 'surogate-core[test]'"
FAMILY, UNIFIED_FAMILY = FAMILIES
ROPE = SHARED["rope_parameters"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_config_json_leaves_out_is_what_transformers_takes(family):
    transformers = pytest.importorskip("transformers", reason=WHY)
    theirs = transformers.AutoConfig.for_model(family.name)
    ours = family.from_hf({"model_type": family.name})
    assert (ours.window, ours.max_positions) == (theirs.sliding_window, theirs.max_position_embeddings)
    assert ours == family.from_hf(json.loads(theirs.to_json_string(use_diff=False)))
    assert (ours.head_dim, ours.global_head_dim, ours.tied) == (256, 512, True)
    kinds = {"sliding_attention": "local", "full_attention": "global"}
    assert ours.layer_types == tuple(kinds[each] for each in theirs.layer_types)


def test_heads_of_global_layers_by_layer_and_by_name_are_the_same_model():
    by_name = {**UNIFIED, "global_head_dim": 32, "num_global_key_value_heads": 1}
    by_layer = {key: value for key, value in by_name.items() if "global" not in key}
    by_layer["per_layer_config"] = {"1": {"head_dim": 32, "num_key_value_heads": 1}}
    assert UNIFIED_FAMILY.from_hf(by_layer) == UNIFIED_FAMILY.from_hf(by_name)
    assert UNIFIED_FAMILY.from_hf({**by_name, "per_layer_config": {}}).global_head_dim == by_name["head_dim"]


@pytest.mark.parametrize(("change", "says"), [
    ({"enable_moe_block": True}, "enable_moe_block is True"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4"),
    ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5"),
    ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input 100 is less"),
    ({"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config may say"),
    ({"per_layer_config": {"2": {"head_dim": 32}, "4": {"head_dim": 64}}}, "per_layer_config may say"),
    ({"per_layer_config": {"2": {"sliding_window": 3}, "4": {"sliding_window": 3}}}, "per_layer_config may say"),
    ({"rope_parameters": {"full_attention": ROPE["full_attention"]}}, "nothing of sliding_attention"),
    ({"rope_parameters": {**ROPE, "sliding_attention": ROPE["full_attention"]}}, "local layers have 'default'"),
    ({"rope_parameters": {**ROPE, "full_attention": {"rope_type": "linear", "factor": 2.0}}}, "local layers have 'default'"),
])  # fmt: skip
def test_refused_by_name(change, says):
    with pytest.raises(WeightError, match=says):
        LoadedModel.from_architecture({**SHARED, **change}, FAMILIES)
    with pytest.raises(WeightError, match="hidden_size_per_layer_input is 16"):
        LoadedModel.from_architecture({**UNIFIED, "hidden_size_per_layer_input": 16}, FAMILIES)


def test_what_gguf_cannot_say_is_refused():
    turned = {**SHARED, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + SHARED["layer_types"][3:]}
    with pytest.raises(WeightError, match="the last two layers with keys of their own are global and local"):
        FAMILY.gguf_metadata(FAMILY.from_hf(turned))
    with pytest.raises(WeightError, match="tables of 200 tokens by layer"):
        FAMILY.gguf_metadata(FAMILY.from_hf({**SHARED, "vocab_size_per_layer_input": 200}))


def test_the_text_of_a_model_that_sees_and_keys_that_are_left_from_before_they_were_shared(tmp_path):
    torch = pytest.importorskip("torch", reason=WHY)
    transformers = pytest.importorskip("transformers", reason=WHY)
    from safetensors.numpy import load_file, save_file

    text = {**{key: value for key, value in SHARED.items() if key != "architectures"}, "pad_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.Gemma4ForConditionalGeneration(transformers.Gemma4Config(text_config=text)).eval()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    before = "model.language_model.layers.3.self_attn."
    left = {f"{before}{name}.weight": np.ones(shape, np.float32) for name, shape in (("k_proj", (32, 64)), ("k_norm", (16,)))}
    save_file({**tensors, **left, "model.vision_tower.x": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    loaded = LoadedModel.open(tmp_path, FAMILIES)
    batch = packed_batch(loaded.hyperparameters.vocab_size)
    with torch.no_grad():
        documents = [torch.from_numpy(batch.tokens[part].astype(np.int64))[None] for part in document_ranges(batch)]
        expected = np.concatenate([model(document).logits[0].numpy() for document in documents])
    assert relative_error(Parity(tmp_path, model, loaded, batch).logits(), expected) < 2e-5


def test_tables_of_layers_are_cut_out_of_a_quantised_one(tmp_path):
    made = Parity.make(FAMILY, {**SHARED, "hidden_size_per_layer_input": 32}, tmp_path / "model")
    write_byte_tokenizer(tmp_path / "model", num_bytes=159, merges=[("t", "h")])
    export(tmp_path / "model", tmp_path / "model.gguf", "q4_0")
    loaded = open_installed(tmp_path / "model.gguf")
    left = {name: loaded.names.load(loaded.store, name) for name, _ in loaded.dsl().parameters()}
    tables = [left[f"layers.{i}.per_layer.embed.weight"] for i in range(5)]
    assert {table.dtype for table in tables} == {"q4_0"}
    whole = loaded.store.get("per_layer_token_embd.weight").to_f32()
    assert np.array_equal(np.concatenate([table.to_f32() for table in tables], axis=1), whole)
    state = made.reference.state_dict()
    for name, tensor in made.loaded.names.export(left).items():
        state[name].copy_(state[name].new_tensor(realized(tensor).to_f32()))
    assert Parity(tmp_path, made.reference, loaded, made.batch).logits_error() < 1e-5


@pytest.fixture(scope="module")
def parity(tmp_path_factory) -> Parity:
    """A random checkpoint with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("gemma4") / "model"
    made = Parity.make(FAMILY, {**SHARED, "vocab_size": 264, "vocab_size_per_layer_input": 264, "max_position_embeddings": 128},
                       folder, seed=2)
    write_byte_tokenizer(folder, ["<s>", "</s>"], bos_token="<s>", eos_token="</s>")
    return made


def trained(parity: Parity, folder, **keys) -> dict[str, np.ndarray]:
    """The tensors of what a run of a few steps on every parameter leaves."""
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"one two {i} three"}) + "\n" for i in range(6)))
    settings = TrainConfig.model_validate({
        "model": str(parity.folder), "datasets": str(folder / "texts.jsonl"), "output_dir": str(folder / "out"), "lora": False,
        "sequence_len": 48, "per_device_train_batch_size": 1, "num_epochs": 1, "learning_rate": 1e-3, "recipe": "fp32",
        "threads": 1, "save_steps": 0, "backend": "cpu", **keys,
    })
    run_training(settings, "pt", Console(file=io.StringIO()))
    assert open_installed(folder / "out" / "model").hyperparameters == parity.loaded.hyperparameters
    return {name: file.get(name).to_f32() for name, file in open_folder(folder / "out" / "model").items()}


def test_a_model_trained_in_full_keeps_its_factors(parity, tmp_path):
    after = trained(parity, tmp_path)
    before = {name: file.get(name).to_f32() for name, file in open_folder(parity.folder).items()}
    assert after.keys() == before.keys()
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {name for name in before if name.endswith("layer_scalar")} and same


def test_a_model_trained_from_scratch_starts_with_factors_of_one(parity, tmp_path):
    after = trained(parity, tmp_path, from_scratch=True, tokenizer=str(parity.folder))
    factors = [value for name, value in after.items() if name.endswith("layer_scalar")]
    assert len(factors) == parity.loaded.hyperparameters.num_layers and all(value == 1 for value in factors)


def test_served_text_is_transformers(parity):
    serve = pytest.importorskip("surogate_serve", reason="serves with the plugin surogate-serve")
    prompts = [parity.batch.tokens[part].tolist() for part in document_ranges(parity.batch)]
    options = serve.EngineOptions(recipe="fp32", threads=1, context=64, max_sequences=3, kv_memory=1 << 20)
    with serve.LLM(parity.folder, options=options) as llm:
        answers = llm.generate(prompts, max_tokens=12, ignore_eos=True)
    expected = [parity.reference_greedy(prompt, 12) for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected
    assert min(len(set(text)) for text in expected) >= 6, "texts of few different ids prove little"


def test_served_with_an_adapter_it_says_what_a_program_with_the_adapter_says(parity, tmp_path):
    serve = pytest.importorskip("surogate_serve", reason="serves with the plugin surogate-serve")
    loaded, generator = parity.loaded, np.random.default_rng(5)

    def half(rows: int, columns: int) -> np.ndarray:
        return np.float32(0.2) * generator.standard_normal((rows, columns), np.float32)

    pairs = {
        name: LoraPair(half(4, each.shape[1]), half(each.shape[0], 4), 2.0)
        for name, each in loaded.dsl().parameters() if each.role in ("attn.q", "attn.k", "per_layer.gate", "mlp.down")
    }
    names = loaded.family.hf_names(loaded.hyperparameters)
    write_adapter(tmp_path, Adapter(pairs, "tiny"), names, loaded.hyperparameters.num_layers)
    prompt = parity.batch.tokens[14:38].tolist()
    options = serve.EngineOptions(recipe="fp32", threads=1, context=64, max_sequences=2, kv_memory=1 << 20, adapter_slots=1)
    with serve.LLM(parity.folder, options=options, adapters={"one": tmp_path}) as llm:
        plain, adapted = (llm.generate([prompt], max_tokens=12, ignore_eos=True, adapter=name)[0].tokens
                          for name in (llm.served.name, "one"))
    weights = FrozenWeights(loaded, "f32")
    decoder = Decoder(loaded, weights, RECIPES["fp32"], 64, adapter=AppliedAdapter.open(tmp_path, loaded), threads=1)
    row, said = decoder.logits(prompt, [0] * len(prompt), range(len(prompt)), [len(prompt) - 1])[0], []
    while len(said) < 12:
        said.append(int(row.argmax()))
        row = decoder.logits([said[-1]], [0], [len(prompt) + len(said) - 1], [0])[0]
    assert adapted == said != plain and len(set(said)) >= 6
