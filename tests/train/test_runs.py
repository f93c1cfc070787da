"""Whole runs on a tiny model, from the configuration to what they leave behind."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import tokenizers

from surogate_core.data import Encoder, Example, load_template
from surogate_core.errors import ConfigError, TrainingError
from surogate_core.export import merge, open_installed
from surogate_core.generate import Generator
from surogate_core.model import AppliedAdapter, FrozenWeights, LoadedModel, loss_program
from surogate_core.passes.precision import RECIPES
from surogate_core.plugins import get_manager
from surogate_core.train.evaluation import Evaluator
from surogate_core.train.prepare import prepare

from . import runs


def logits(model: LoadedModel, weights: FrozenWeights | None = None, adapter: AppliedAdapter | None = None) -> np.ndarray:
    """fp32 logits of 24 fixed tokens."""
    weights = weights or FrozenWeights(model, "f32")
    for name, array in (adapter.arrays if adapter else {}).items():
        weights.adopt(name, "f32", array)
    graph, program = loss_program(model, RECIPES["fp32"], weights, {"T": 24, "D": 2}, max_positions=32, output="logits",
                                  adapter=adapter.spec if adapter else None)
    session = weights.open_session(graph, program, threads=1)
    session.tensor("tokens")[:] = np.arange(24) * 7 % 256
    session.tensor("positions")[:] = np.arange(24)
    session.tensor("doc_starts")[:] = (0, 24)
    session.run("forward")
    return session.tensor("logits").copy()


class TestResults:
    @pytest.mark.parametrize("recipe", ["fp32", "bf16"])
    def test_lora_learns_and_leaves_an_adapter_that_loads_back(self, root, recipe):
        settings = runs.config(root, num_epochs=4, recipe=recipe)
        result = runs.run(settings)
        losses = [r["loss"] for r in result.history]
        assert result.status == "completed" and result.steps == 28 == len(losses)
        assert np.mean(losses[-4:]) < 0.85 * losses[0]
        model = open_installed(root / "model")
        adapted = logits(model, adapter=AppliedAdapter.open(root / "out" / "adapter", model))
        assert np.abs(adapted - logits(model)).max() > 0.1
        prepared, session = runs.open_run(settings)
        from surogate_core.train import checkpoint

        checkpoint.load(checkpoint.list_checkpoints(root / "out")[-1], session)
        weights = FrozenWeights(model, "f32")
        for name, p in session.layout.parameters.items():
            weights.adopt(name, "f32", session.parameter(name))
        held = AppliedAdapter(prepared.adapter, {n: session.parameter(n) for n in session.layout.parameters})
        np.testing.assert_allclose(logits(model, weights, held), adapted, atol=1e-4)

    def test_full_fine_tuning_leaves_a_model_that_loads_back(self, root):
        result = runs.run(runs.config(root, num_epochs=3, lora=False, learning_rate=3e-3))
        losses = [r["loss"] for r in result.history]
        assert losses[-1] < 0.9 * losses[0]
        tuned = open_installed(root / "out" / "model")
        assert tuned.hyperparameters == open_installed(root / "model").hyperparameters
        state = runs.final_state(root / "out")
        stored = tuned.names.load(tuned.store, "layers.0.attn.q.weight")
        assert stored.dtype == "f32" and np.array(stored.data).tobytes() == state["master/layers.0.attn.q.weight"]
        assert tuned.tokenizer().encode("fox") == open_installed(root / "model").tokenizer().encode("fox")
        generation = json.loads((root / "out" / "model" / "generation_config.json").read_text())
        assert generation["eos_token_id"] == tuned.tokenizer().token_id("<|im_end|>")  # else transformers never stops

    def test_a_prompt_is_the_beginning_of_what_was_trained_on(self, root):
        """Where the tokenizer begins a text with a token and the template does not, both put it there, once."""
        path = root / "model" / "tokenizer.json"
        inner = tokenizers.Tokenizer.from_file(str(path))
        start = inner.token_to_id("<|endoftext|>")
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)])
        inner.save(str(path))
        config = path.with_name("tokenizer_config.json")
        config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token": "<|endoftext|>"}))
        generator = Generator(root / "model", recipe="fp32", threads=1, context=64)
        messages = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]
        template = load_template(None, generator.tokenizer)
        trained = Encoder(generator.tokenizer, template).encode(Example(messages=messages)).ids.tolist()
        prompt = generator.prompt_tokens(messages[:1], None)
        assert prompt == trained[:len(prompt)] and prompt.count(start) == 1 and prompt[0] == start

    def test_the_template_of_a_run_goes_with_what_it_leaves(self, root):
        talk = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|endoftext|>{% endfor %}"
        runs.run(runs.config(root, chat_template=talk, max_steps=1))
        generator = Generator(root / "model", root / "out" / "adapter", recipe="fp32", threads=1, context=64)
        merge(root / "model", root / "out" / "adapter", root / "merged", "f32")
        for tokenizer in (generator.tokenizer, open_installed(root / "merged").tokenizer()):
            ends = {tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")}
            assert tokenizer.chat_template == talk and set(tokenizer.stop_token_ids) == ends
        assert open_installed(root / "model").tokenizer().chat_template == runs.TEMPLATE
        other = Generator(root / "model", root / "out" / "adapter", recipe="fp32", threads=1, context=64, chat_template="plain")
        assert other.tokenizer.chat_template == get_manager().chat_templates["plain"]

    def test_from_scratch_on_text(self, root):
        (root / "text.txt").write_text("\n\n".join(runs.text_of(i, 30) for i in range(30)))
        settings = runs.config(
            root, model=None, from_scratch=True, architecture=runs.ARCHITECTURE, tokenizer=str(root / "model"), lora=False,
            datasets=str(root / "text.txt"), overlong="split", num_epochs=12, learning_rate=1e-2, lr_scheduler_type="cosine",
            warmup_ratio=0.1, recipe="bf16", per_device_train_batch_size=4, gradient_accumulation_steps=1)
        result = runs.run(settings, "pt")
        losses = [r["loss"] for r in result.history]
        assert losses[0] == pytest.approx(np.log(260), rel=0.03)
        assert losses[-1] < 0.65 * losses[0]
        tuned = open_installed(root / "out" / "model")
        assert tuned.hyperparameters.num_layers == 2

    def test_what_a_run_leaves(self, root):
        runs.run(runs.config(root, save_steps=2, save_total_limit=2, report_to=["csv"]))
        found = {path.name for path in (root / "out").iterdir()}
        assert found == {"config.yaml", "metrics.jsonl", "metrics.csv", "loss.png", "adapter", "step_00000006",
                         "step_00000007"}
        assert (root / "out" / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert [r["step"] for r in runs.records(root / "out")] == list(range(1, 8))
        assert [line.split(",")[0] for line in (root / "out" / "metrics.csv").read_text().splitlines()] == [
            "step", *map(str, range(1, 8))]

    def test_an_evaluation_at_the_end_is_in_the_files(self, root):
        """The last step's record has it, whatever the interval, and metrics.csv gets a column for it."""
        runs.write_rows(root / "held.jsonl", runs.chats(4, seed=90))
        result = runs.run(runs.config(root, validation_datasets=str(root / "held.jsonl"), eval_steps=0, report_to=["csv"]))
        records = runs.records(root / "out")
        assert [r["step"] for r in records if "eval_loss" in r] == [7]
        assert records[-1]["eval_loss"] == result.evaluation and result.evaluation["held"] > 0
        with (root / "out" / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["step"] for row in rows if row["eval_loss/held"]] == ["7"] and len(rows) == 7
        assert float(rows[-1]["eval_loss/held"]) == result.evaluation["held"]

    def test_the_resolved_configuration_repeats_the_run(self, root):
        from surogate_core.config import resolve

        runs.run(runs.config(root))
        again = resolve(root / "out" / "config.yaml", [f"output_dir={root / 'again'}"])
        runs.run(again)
        assert runs.course(root / "out") == runs.course(root / "again")

    def test_banner_and_progress_lines(self, root):
        screen = runs.console()
        runs.write_rows(root / "held.jsonl", runs.chats(4, seed=90))
        runs.run(runs.config(root, validation_datasets=str(root / "held.jsonl"), logging_steps=3, eval_steps=2), screen=screen)
        text = runs.shown(screen)
        for part in ("recipe fp32", "LoRA rank 4, scale 8", "24 documents", "1 x 2 accumulation = 2 sequences of 96 tokens",
                     "memory ", "tokens/s", "MiB  left", "held: loss", "completed after step 7"):
            assert part in text, part
        assert [line.split()[1] for line in text.splitlines() if line.startswith("step ")] == [
            f"{n}/7" for n in (2, 3, 4, 6, 7)]


class TestSameBits:
    """What is a matter of speed or memory alone changes no bit of a run."""

    @pytest.fixture
    def reference(self, root):
        settings = dict(recipe="bf16", lora_dropout=0.2)
        runs.run(runs.config(root, output_dir=str(root / "reference"), **settings))
        return settings, runs.final_state(root / "reference"), runs.course(root / "reference")

    def test_recomputation(self, root, reference):
        settings, state, course = reference
        whole = prepare(runs.config(root, **settings), "sft").plan
        budget = whole.resident_bytes - whole.saved_bytes[0] // 3
        plan = prepare(runs.config(root, memory_budget=budget, **settings), "sft").plan
        assert plan.saved_bytes[1] < plan.saved_bytes[0]
        runs.run(runs.config(root, memory_budget=budget, **settings))
        assert runs.final_state(root / "out") == state and runs.course(root / "out") == course

    def test_threads(self, root, reference):
        settings, state, course = reference
        runs.run(runs.config(root, threads=2, **settings))
        assert runs.final_state(root / "out") == state and runs.course(root / "out") == course


class TestMemoryBudget:
    @pytest.mark.parametrize("lora", [True, False])
    def test_every_budget_down_to_the_least_is_kept(self, root, lora):
        def plan(budget):
            settings = runs.config(root, lora=lora, memory_budget=budget, recipe="bf16", per_device_train_batch_size=6)
            return prepare(settings, "sft").plan

        whole = plan("1GiB")
        with pytest.raises(TrainingError, match="needs at least [0-9.]+ MiB with everything recomputed") as caught:
            plan(1 << 16)
        assert caught.value.hint.startswith("Nothing that was tried would fit; the least, ")
        least = float(caught.value.message.split("at least ")[1].split(" ")[0]) * 2**20 + 0.06 * 2**20
        assert least < whole.resident_bytes
        for share in (0.0, 0.2, 0.5, 0.8, 1.0):
            budget = int(least + share * (whole.resident_bytes - least))
            found = plan(budget)
            assert found.resident_bytes <= budget
            assert found.saved_bytes[1] <= whole.saved_bytes[1]

    @pytest.mark.parametrize("changes", [{}, {"lora": False, "recipe": "bf16"}, {"recipe": "bf16"}])
    def test_evaluation_is_part_of_the_budget(self, root, changes):
        runs.write_rows(root / "held.jsonl", runs.chats(6))
        held = {"validation_datasets": str(root / "held.jsonl"), **changes}
        prepared, session = runs.open_run(runs.config(root, **held))
        evaluator = Evaluator(prepared, session)
        evaluator.losses()
        memory = evaluator._session.memory()
        assert prepared.evaluation_bytes == sum(memory["arenas"].values()) + memory["workspace"] > 0
        budget = prepared.plan.resident_bytes + prepared.evaluation_bytes
        assert prepare(runs.config(root, memory_budget=budget, **held), "sft").plan.saved_bytes == prepared.plan.saved_bytes
        tighter = prepare(runs.config(root, memory_budget=budget - 1, **held), "sft")
        assert tighter.plan.resident_bytes + tighter.evaluation_bytes < budget

    def test_what_is_planned_is_what_the_session_takes(self, root):
        prepared, session = runs.open_run(runs.config(root, threads=2))
        memory = session.session.memory()
        held = sum(memory["arenas"].values()) + memory["workspace"] + sum(memory["external"].values())
        assert held == prepared.plan.resident_bytes

    def test_an_impossible_budget_stops_a_run_before_it_writes_anything(self, root):
        with pytest.raises(TrainingError, match="may take"):
            runs.run(runs.config(root, memory_budget=1 << 16))
        assert not (root / "out").exists()


class TestBadSettings:
    def test_lora_targets(self, root):
        with pytest.raises(ConfigError, match="no linear layer is called 'q_prj'") as caught:
            prepare(runs.config(root, lora_target_modules=["q_prj"]), "sft")
        assert "q_proj" in caught.value.hint
        prepared = prepare(runs.config(root, lora_target_modules=["q_proj", "mlp.down"]), "sft")
        assert prepared.adapter.roles == {"attn.q", "mlp.down"}

    def test_a_full_disk_is_seen_before_the_first_step(self, root, monkeypatch):
        import shutil

        from surogate_core.train import prepare as module

        usage = shutil.disk_usage(root)._replace(free=1000)
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(ConfigError, match="its checkpoints need"):
            runs.run(runs.config(root))


def test_metrics_are_json(root):
    runs.run(runs.config(root))
    first = json.loads((root / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert {"step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "targets", "tokens_seen", "seconds",
            "tokens_per_second", "padded_tokens_per_second"} <= first.keys()
