"""The real SmolLM2-135M-Instruct, from its Q4_1 file: against transformers on the dequantised weights, and llama.cpp."""

from __future__ import annotations

import pydoc_data.topics

import gguf
import numpy as np
import pytest

from surogate_core.engine import default_threads
from surogate_core.generate import Decoder, installed_families
from surogate_core.model import FrozenWeights, LoadedModel
from surogate_core.passes.precision import RECIPES
from surogate_core.weights.default_model import find_default_model

FP32_TOLERANCE = 5e-4
"""Of logits that reach 30; transformers' own distance from float64 is 9e-5."""
GREEDY = 24
BACKENDS = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(scope="module")
def path():
    found = find_default_model()
    if found is None:
        pytest.skip("the default model is not here: surogate fetch-default-model")
    return found


@pytest.fixture(scope="module")
def model(path) -> LoadedModel:
    return LoadedModel.open(path, installed_families())


@pytest.fixture(scope="module")
def prompt(model) -> list[int]:
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = model.tokenizer().encode(text)
    assert 15 <= len(ids) <= 25
    return ids


def decoder_of(model, recipe, context, backend="cpu") -> Decoder:
    weights = FrozenWeights(model, RECIPES[recipe].compute, backend)
    return Decoder(model, weights, RECIPES[recipe], context, threads=default_threads())


def prompt_logits(model, prompt, recipe, backend="cpu") -> np.ndarray:
    """float32 [len(prompt), vocab]: each token's own row, through the cache."""
    decoder = decoder_of(model, recipe, 64, backend)
    rows = [decoder.logits([token], [0], [position], [0])[0].copy() for position, token in enumerate(prompt)]
    together = decoder.logits(prompt, [0] * len(prompt), range(len(prompt)), [len(prompt) - 1])[0]
    # In bf16 a prompt's products round weights, a decoded token's do not: each is up to 0.37 from fp32, to either side.
    np.testing.assert_allclose(together, rows[-1], atol=FP32_TOLERANCE if recipe == "fp32" else 0.75)
    return np.stack(rows)


def greedy(model, prompt, recipe, count, backend="cpu") -> tuple[list[int], list[float]]:
    """Ids, and how far apart the two largest logits were at each."""
    decoder = decoder_of(model, recipe, 64, backend)
    row = decoder.logits(prompt, [0] * len(prompt), range(len(prompt)), [len(prompt) - 1])[0]
    ids, gaps = [], []
    while True:
        second, first = np.partition(row, -2)[-2:]
        ids.append(int(row.argmax()))
        gaps.append(float(first - second))
        if len(ids) == count:
            return ids, gaps
        row = decoder.logits([ids[-1]], [0], [len(prompt) + len(ids) - 1], [0])[0]


@pytest.fixture(scope="module")
def reference(path):
    """transformers' model in fp32, from what llama.cpp's own Python package reads out of the file."""
    torch = pytest.importorskip("torch", reason="compares with transformers: pip install 'surogate-core[test]'")
    transformers = pytest.importorskip("transformers", reason="compares with transformers: pip install 'surogate-core[test]'")
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rms_norm_eps=1e-5, max_position_embeddings=8192, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    state = {hf_name(tensor.name): torch.tensor(hf_values(tensor)) for tensor in gguf.GGUFReader(path).tensors}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    assert not [name for name, p in model.named_parameters() if p.is_meta]
    return model.eval()


def hf_name(name: str) -> str:
    parts = {
        "blk": "model.layers", "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    return ".".join(parts.get(part, part) for part in name.split("."))


def hf_values(tensor) -> np.ndarray:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
    if "attn_q." in tensor.name or "attn_k." in tensor.name:  # rotated pairs lie side by side in the file
        heads = len(values) // 64
        values = values.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(values.shape)
    return values


@pytest.fixture(scope="module")
def exact(reference, prompt) -> np.ndarray:
    import torch

    with torch.no_grad():
        return reference(torch.tensor([prompt])).logits[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_logits_equal_transformers(model, prompt, exact, backend):
    error = float(np.abs(prompt_logits(model, prompt, "fp32", backend) - exact).max())
    assert error < FP32_TOLERANCE, error


@pytest.mark.slow
def test_bf16_is_nearer_to_fp32_than_transformers_in_bf16(model, prompt, exact, reference):
    import copy

    import torch

    with torch.no_grad():
        theirs = copy.deepcopy(reference).to(torch.bfloat16)(torch.tensor([prompt])).logits[0].float().numpy()
    ours = prompt_logits(model, prompt, "bf16")
    errors = [float(np.abs(each - exact).mean()) for each in (ours, theirs)]
    assert errors[0] < 0.85 * errors[1], errors


@pytest.fixture(scope="module")
def reply(llama_cpp, path, prompt, tmp_path_factory) -> dict:
    question = {"model": path, "logits": [prompt], "greedy": [[prompt, GREEDY]]}
    return llama_cpp.ask([question], tmp_path_factory.mktemp("llama_cpp"))[0]


@pytest.mark.slow
def test_bf16_is_nearer_to_fp32_than_llama_cpp(model, prompt, exact, reply):
    ours = float(np.abs(prompt_logits(model, prompt, "bf16") - exact).mean())
    theirs = float(np.abs(reply["logits"] - exact).mean())
    assert ours < 0.7 * theirs, (ours, theirs)


@pytest.mark.slow
def test_greedy_text_equals_llama_cpp_until_a_tie(model, prompt, reply):
    """llama.cpp rounds activations to 8 bits here, which moves logits by up to 3: its text may split from ours only where
    our two largest logits are nearer than twice what was measured on the prompt."""
    ours = prompt_logits(model, prompt, "fp32")
    tolerance = 2 * float(np.abs(ours[-1] - reply["logits"][-1]).max())
    assert tolerance < 6
    ids, gaps = greedy(model, prompt, "fp32", GREEDY)
    equal = next((i for i, (a, b) in enumerate(zip(ids, reply["greedy"][0])) if a != b), GREEDY)
    assert equal == GREEDY or gaps[equal] < tolerance, (equal, gaps[equal], tolerance)
    assert "Paris" in model.tokenizer().decode(ids)


def test_tokens_equal_llama_cpps(model, path, llama_cpp, tmp_path):
    tokenizer = model.tokenizer()
    texts = [*pydoc_data.topics.topics.values(), *VARIED]
    questions = [[text, special] for text in texts for special in (True, False)]
    [reply] = llama_cpp.ask([{"model": path, "tokenize": questions}], tmp_path)
    for (text, special), ids in zip(questions, reply["tokenize"]):
        assert tokenizer.encode(text, parse_special=special) == ids, text[:200]


VARIED = [
    "", " ", "\n", "\t\t", "   three spaces", "trailing   ", "a\r\nb\r\n\r\nc", "1234567890 12 345,678.90 0x1F 1e-9",
    "don't can't I'LL we've O'Neil", "<|im_start|>system\nHi<|im_end|>\n", "<|endoftext|><|im_end|><|im_sta", "naïve Zoë São Ærø",
    "e\u0301 n\u0303 \u1e9b\u0323", "日本語の文章と한국어 และ ไทย", "🙂👩\u200d💻🏳️\u200d🌈", "ǅ ﬁ ½ ² ٣ Ⅷ", "\u00a0\u2003\u3000x",
    "x" * 300, "ab " * 200, "{\"key\": [1, 2.5, null], \"s\": \"\\u00e9\"}", "def f(x):\n    return x ** 2  # square\n",
    "https://example.org/a?b=c&d=%20#e", "\u0000\u0001\u007f", "мир ÑÒ ßẞ İı", "a\u200bb\ufeffc",
]  # fmt: skip
