"""Every variant of every installed family, served: the server says to the bit what the trainer's forward pass says, within
rounding on a device; and it says what transformers and PEFT say, whose arithmetic is none of ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate_core.model import initial_values
from surogate_core.testing.parity import Parity, document_ranges, installed_family
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_core.weights.export import write_hf
from surogate_core.weights.tensor import from_f32

from . import variants
from .in_peft import in_peft, of_peft, saved
from .variants import Case, cases

serve = pytest.importorskip("surogate_serve", reason="serves models: pip install surogate-serve")

VOCAB = 264
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPTIONS = serve.EngineOptions(threads=1, max_sequences=4, kv_memory=4 << 20)
ON_DEVICE = replace(OPTIONS, backend="cuda", kv_memory=64 << 20, token_budget=256)
TOP, ANSWER = 5, 16


def checkpoint(case: Case, folder: Path) -> Path:
    """Random weights loud enough for answers to be more than noise; room for the conversations."""
    family = installed_family(case[0])
    config = dict(family.tiny_configs()[case[1]])
    config |= {key: VOCAB for key in config if key.startswith("vocab_size")} | {"max_position_embeddings": 1024}
    h = family.from_hf(config)
    parameters = {}
    for name, parameter in family.model(h).parameters():
        array = np.asarray(initial_values(name, parameter.shape, parameter, 7), np.float32)
        parameters[name] = from_f32(name, array * np.float32(4 if array.ndim > 1 else 1))
    write_hf(folder, family.hf_names(h).export(parameters), family.hf_config(h), dtype="f32")
    return write_byte_tokenizer(folder, SPECIAL, merges=[("t", "h")], eos_token="<|im_end|>", chat_template=TEMPLATE)


@pytest.mark.parametrize("case", cases(), ids="-".join)
def test_the_server_says_what_the_trainer_says(case, tmp_path):
    from surogate_serve.parity import compare

    options = replace(OPTIONS, recipe="fp32", batch_invariant=True)
    for row in compare(checkpoint(case, tmp_path / "model"), None, False, options, 8):
        assert (row.tokens, row.differ, row.largest) == (48, 0, 0.0), row.name


@pytest.mark.cuda
@pytest.mark.parametrize(("recipe", "largest", "mean", "differ"), [("fp32", 5e-5, 5e-6, 1), ("bf16", 0.15, 0.03, 8)])
@pytest.mark.parametrize("case", cases(), ids="-".join)
def test_a_device_says_it_within_rounding(case, tmp_path, recipe, largest, mean, differ):
    """The likeliest token may be another one where two are as likely but for rounding."""
    from surogate_serve.parity import compare

    for row in compare(checkpoint(case, tmp_path / "model"), None, False, replace(ON_DEVICE, recipe=recipe), 8):
        assert row.tokens == 48 and row.differ <= differ, row
        assert row.largest < largest and row.mean < mean, row


@dataclass
class Asked:
    """A variant's checkpoint, and an adapter of PEFT's on every linear of its stack. ``references``: transformers' model and
    PEFT's, by the name of the adapter that the server is asked for."""

    parity: Parity
    adapter: Path
    references: dict[str | None, Parity]

    def served(self, options: Any) -> Any:
        options = replace(options, adapter_slots=1, adapter_rank=8, token_budget=64)
        return serve.LLM(self.parity.folder, {"peft": self.adapter}, options)


@pytest.fixture(scope="module", params=cases(), ids="-".join)
def asked(request, tmp_path_factory) -> Asked:
    folder = tmp_path_factory.mktemp("asked")
    parity = variants.checkpoint(request.param, folder / "model")
    model = in_peft(parity, r=8, lora_alpha=12)
    return Asked(parity, saved(model, folder / "adapter"), {None: parity, "peft": of_peft(parity, model)})


def said(llm: Any, parity: Parity, adapter: str | None) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """The documents of the batch and what the server goes on with after each, all side by side. Of their tokens but for each
    one's first, and of the TOP likeliest there: ids and log-probabilities [tokens, 1 + TOP]."""
    documents = [parity.batch.tokens[part].tolist() for part in document_ranges(parity.batch)]
    answers = llm.generate(
        documents, max_tokens=ANSWER, ignore_eos=True, logprobs=TOP, prompt_logprobs=True, adapter=adapter)
    told = [one for each in answers for one in (*each.prompt_logprobs[1:], *each.choices[0].logprobs)]
    pairs = np.array([[(one.token, one.logprob), *one.top[:TOP]] for one in told])
    return [[*each.prompt, *each.tokens] for each in answers], pairs[..., 0].astype(int), pairs[..., 1]


def logprobs(parity: Parity, texts: list[list[int]], dtype: str = "float32") -> np.ndarray:
    """float64 [tokens, vocab]: the reference's, of the tokens that follow each of ``texts``' but for its last."""
    logits = parity.reference_logits(dtype, [text[:-1] for text in texts])
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("options", [
    pytest.param(OPTIONS, id="cpu"), pytest.param(ON_DEVICE, id="cuda", marks=pytest.mark.cuda)])  # fmt: skip
def test_the_server_says_what_transformers_and_peft_say(asked, options):
    with asked.served(replace(options, recipe="fp32")) as llm:
        for adapter, reference in asked.references.items():
            texts, ids, ours = said(llm, reference, adapter)
            theirs = logprobs(reference, texts)
            assert np.abs(ours - np.take_along_axis(theirs, ids, 1)).max() < 2e-4
            assert np.abs(ours[:, 1:] - -np.sort(-theirs)[:, :TOP]).max() < 2e-4, "some other token is likelier"
            best = np.split(theirs.argmax(axis=1), np.cumsum([len(text) - 1 for text in texts])[:-1])
            for text, likeliest in zip(texts, best, strict=True):
                assert text[-ANSWER:] == likeliest[-ANSWER:].tolist()
            different = {token for text in texts for token in text[-ANSWER:]}
            assert len(different) >= ANSWER, "texts of few different ids prove little"


@pytest.mark.cuda
def test_bf16_on_a_device_is_as_near_to_the_truth_as_torch(asked):
    with asked.served(replace(ON_DEVICE, recipe="bf16")) as llm:
        for adapter, reference in asked.references.items():
            texts, ids, ours = said(llm, reference, adapter)
            exact, theirs = (np.take_along_axis(logprobs(reference, texts, dtype), ids, 1) for dtype in ("float64", "bfloat16"))
            assert np.abs(ours - exact).mean() < 1.25 * np.abs(theirs - exact).mean()
