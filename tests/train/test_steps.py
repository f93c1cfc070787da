"""Steps: accumulation, documents that do not see each other, evaluation, dropout, clipping."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from surogate_core.data.loader import Step
from surogate_core.model import loss_program
from surogate_core.train.evaluation import Evaluator
from surogate_core.train.session import write_batch

from . import runs


def first_step(settings, lifted: bool = True, index: int = 0):
    """Loss and gradients by parameter of a run's first step, and the step itself."""
    prepared, session = runs.open_run(settings)
    if lifted and settings.lora:
        runs.lift_b(session)
    step = prepared.loader.next_step()
    loss = session.accumulate(step, index)
    gradients = {name: session.session.tensor(f"gradients.{name}").copy() for name in session.layout.parameters}
    return loss, gradients, step


class TestAccumulation:
    """One batch of 8, 2 of 4, 4 of 2, 8 of 1: the same rows, cut otherwise."""

    @pytest.mark.parametrize("lora", [True, False])
    @pytest.mark.parametrize("packing", [True, False])
    def test_loss_and_gradients_are_those_of_one_batch(self, root, lora, packing):
        results = []
        for size, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
            results.append(first_step(runs.config(
                root, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, lora=lora,
                sample_packing=packing)))
        loss, gradients, step = results[0]
        for other_loss, other, other_step in results[1:]:
            counts = [b.num_targets for b in other_step]
            assert len(set(counts)) > 1, "every micro-batch has as many targets: nothing would be shown"
            assert sum(counts) == step.num_targets
            assert other_loss == pytest.approx(loss, rel=1e-6)
            for name, gradient in gradients.items():
                error = np.linalg.norm(other[name] - gradient)
                assert error <= 3e-6 * np.linalg.norm(gradient) + 1e-9, name

    def test_the_loss_is_the_mean_over_target_tokens_not_over_micro_batches(self, root):
        prepared, session = runs.open_run(runs.config(root))
        step = prepared.loader.next_step()
        alone = [session.accumulate(Step([batch], 0, 0), 0) for batch in step]
        counts = [batch.num_targets for batch in step]
        assert counts[0] != counts[1]
        together = session.accumulate(Step(list(step), 0, 0), 0)
        assert together == pytest.approx(np.average(alone, weights=counts), rel=1e-6)
        assert abs(together - np.mean(alone)) > 1e-5

    def test_a_short_last_step_divides_by_its_own_targets(self, root):
        """Ten rows, four a step: three steps, the last of two."""
        runs.write_rows(root / "chat.jsonl", runs.chats(10))
        settings = runs.config(root, sample_packing=False, gradient_accumulation_steps=4)
        prepared, session = runs.open_run(settings)
        assert prepared.total_steps == 3
        steps = list(prepared.loader.epoch())
        assert [len(step) for step in steps] == [4, 4, 2]
        for step in steps:
            assert sum(float(b.token_weights.sum(dtype=np.float64)) for b in step) == pytest.approx(1, rel=1e-6)
        alone = [session.accumulate(Step([b], 0, 0), 0) for b in steps[2]]
        counts = [b.num_targets for b in steps[2]]
        loss = session.accumulate(Step(list(steps[2]), 0, 0), 0)
        assert loss == pytest.approx(np.average(alone, weights=counts), rel=1e-6)
        result = runs.run(settings)
        assert result.steps == 3 and [r["targets"] for r in result.history] == [s.num_targets for s in steps]


class TestPacking:
    @pytest.fixture
    def packed(self, root):
        settings = runs.config(root, gradient_accumulation_steps=1)
        prepared, session = runs.open_run(settings)
        batch = prepared.loader.next_step()[0]
        starts = [int(s) for s in dict.fromkeys(batch.doc_starts)]
        documents = [slice(a, b) for a, b in zip(starts, starts[1:]) if (batch.targets[a:b] >= 0).any()]
        assert len(documents) >= 2, "this bin holds one document: nothing would be shown"
        return prepared, batch, documents

    def sessions(self, prepared, output):
        def run(batch) -> np.ndarray:
            graph, program = loss_program(prepared.model, prepared.recipe, prepared.weights, prepared.plan.bindings,
                                          max_positions=96, output=output)
            session = prepared.weights.open_session(graph, program, threads=1)
            names = {t.name for t in program.tensors}
            for name in ("tokens", "targets", "positions", "token_weights", "doc_starts"):
                if name in names:
                    session.tensor(name)[:] = getattr(batch, name)
            if output == "loss":
                session.run("begin")
            session.run("forward")
            return session.tensor("token_loss" if output == "loss" else "logits").copy()

        return run

    @pytest.mark.parametrize("output", ["logits", "loss"])
    def test_a_document_does_not_see_what_stands_before_it(self, packed, output):
        """Its figures stay, to the bit, when every other document's tokens change."""
        prepared, batch, documents = packed
        run = self.sessions(prepared, output)
        before = run(batch)
        for kept in documents:
            tokens = ((batch.tokens + 17) % 256).astype(np.int32)
            tokens[kept] = batch.tokens[kept]
            after = run(replace(batch, tokens=tokens))
            assert np.array_equal(after[kept], before[kept])
            if output == "logits":
                assert not np.array_equal(after, before)

    def test_a_document_alone_is_the_document_in_a_pack(self, packed):
        prepared, batch, documents = packed
        run = self.sessions(prepared, "logits")
        whole = run(batch)
        second = documents[1]
        length = second.stop - second.start
        tokens = np.zeros_like(batch.tokens)
        tokens[:length] = batch.tokens[second]
        positions = np.concatenate([np.arange(length), np.arange(len(tokens) - length)]).astype(np.int32)
        starts = np.full_like(batch.doc_starts, len(tokens))
        starts[:2] = 0, length
        alone = run(replace(batch, tokens=tokens, positions=positions, doc_starts=starts))
        np.testing.assert_allclose(alone[:length], whole[second], rtol=0, atol=1e-6 * np.abs(whole).max())

    def test_gradients_of_packed_rows_are_those_of_rows_alone(self, root):
        """All rows in one step, packed and not: the same sum in another grouping."""
        runs.write_rows(root / "chat.jsonl", runs.chats(12))
        results = [first_step(runs.config(root, sample_packing=packing, gradient_accumulation_steps=12))
                   for packing in (True, False)]
        (loss, gradients, packed), (other_loss, other, alone) = results
        assert len(packed) < len(alone) == 12 and packed.num_targets == alone.num_targets
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            assert np.linalg.norm(other[name] - gradient) <= 3e-6 * np.linalg.norm(gradient) + 1e-9, name

    def test_a_batch_with_more_documents_than_the_program_is_refused(self, root):
        prepared, session = runs.open_run(runs.config(root))
        batch = prepared.loader.next_step()[0]
        many = np.append(np.arange(len(batch.doc_starts), dtype=np.int32), np.int32(96))
        with pytest.raises(ValueError, match="documents"):
            write_batch(session.session, replace(batch, doc_starts=many))


class TestEvaluation:
    def loss(self, root, **changes) -> float:
        settings = runs.config(root, validation_datasets=str(root / "held.jsonl"), **changes)
        prepared, session = runs.open_run(settings)
        runs.lift_b(session)
        return Evaluator(prepared, session).losses()["held"]

    def test_packed_and_unpacked_agree(self, root):
        runs.write_rows(root / "held.jsonl", runs.chats(9, seed=500))
        expected = self.loss(root)
        assert self.loss(root, sample_packing=False) == pytest.approx(expected, rel=1e-6)
        assert self.loss(root, sample_packing=False, per_device_train_batch_size=4) == pytest.approx(expected, rel=1e-6)

    def test_it_is_the_loss_of_training_on_the_same_rows(self, root):
        runs.write_rows(root / "held.jsonl", runs.chats(24))
        loss, _, _ = first_step(runs.config(root, gradient_accumulation_steps=24))
        assert self.loss(root) == pytest.approx(loss, rel=1e-6)

    def test_it_follows_training_and_has_no_dropout(self, root):
        runs.write_rows(root / "held.jsonl", runs.chats(6))
        settings = runs.config(root, validation_datasets=str(root / "held.jsonl"), lora_dropout=0.5)
        prepared, session = runs.open_run(settings)
        evaluator = Evaluator(prepared, session)
        before = evaluator.losses()["held"]
        assert evaluator.losses()["held"] == before
        for index in range(3):
            session.step(prepared.loader.next_step(), index, 1e-2)
        assert evaluator.losses()["held"] < before

    def test_it_disturbs_no_step(self, root):
        runs.write_rows(root / "held.jsonl", runs.chats(6))
        runs.run(runs.config(root, output_dir=str(root / "a"), recipe="bf16"))
        runs.run(runs.config(root, output_dir=str(root / "b"), recipe="bf16", eval_steps=2,
                             validation_datasets=str(root / "held.jsonl")))
        assert runs.course(root / "a") == runs.course(root / "b")
        assert [r["step"] for r in runs.records(root / "b") if "eval_loss" in r] == [2, 4, 6, 7]


class TestDropout:
    def test_the_same_seed_gives_the_same_gradient_and_another_step_another(self, root):
        settings = runs.config(root, lora_dropout=0.5)
        one, two, three = (first_step(settings, index=index) for index in (0, 0, 1))
        assert one[0] == two[0] and all(np.array_equal(g, two[1][n]) for n, g in one[1].items())
        assert one[0] != three[0]

    def test_another_seed_gives_another_mask(self, root):
        runs.write_rows(root / "chat.jsonl", runs.chats(1))
        losses = {first_step(runs.config(root, lora_dropout=0.5, seed=seed), lifted=False)[2].num_targets for seed in (1, 2)}
        assert len(losses) == 1
        gradients = [first_step(runs.config(root, lora_dropout=0.5, seed=seed))[0] for seed in (1, 2)]
        assert gradients[0] != gradients[1]

    def test_layers_and_roles_have_masks_of_their_own(self, root):
        prepared, _ = runs.open_run(runs.config(root, lora_dropout=0.5))
        streams = [dict(i.attrs)["stream_id"] for i in prepared.plan.program.instructions if i.op == "dropout"]
        assert len(set(streams)) == 14


class TestUpdate:
    def test_clipping_scales_to_the_limit_and_reports_the_norm_before(self, root):
        prepared, session = runs.open_run(runs.config(root, max_grad_norm=0.01))
        step = prepared.loader.next_step()
        session.accumulate(step, 0)
        gradient = session.session.tensor("gradients").astype(np.float64)
        norm = session.update(0, 0.0)
        assert norm == pytest.approx(np.linalg.norm(gradient), rel=1e-6) and norm > 0.01
        first_moment = session.session.tensor("optimizer.m").astype(np.float64)
        assert np.linalg.norm(first_moment) == pytest.approx(0.1 * 0.01, rel=1e-3)

    def test_no_clipping_at_zero(self, root):
        prepared, session = runs.open_run(runs.config(root, max_grad_norm=0))
        session.accumulate(prepared.loader.next_step(), 0)
        gradient = session.session.tensor("gradients").copy()
        session.update(0, 0.0)
        np.testing.assert_allclose(session.session.tensor("optimizer.m"), 0.1 * gradient, rtol=1e-5, atol=1e-12)

    def test_weight_decay_is_for_matrices_alone(self, root):
        settings = runs.config(root, lora=False, weight_decay=0.5, learning_rate=1e-2)
        prepared, session = runs.open_run(settings)
        session.session.run("begin")  # no gradient at all: only decay moves anything
        before = {name: session.parameter(name).copy() for name in session.layout.parameters}
        session.update(0, 1e-2)
        for name, value in before.items():
            factor = 1 - 1e-2 * 0.5 if value.ndim > 1 else 1.0
            np.testing.assert_allclose(session.parameter(name), factor * value, rtol=1e-6, err_msg=name)

    def test_a_step_is_adamw(self, root):
        settings = runs.config(root, weight_decay=0.1, max_grad_norm=0, learning_rate=1e-2)
        prepared, session = runs.open_run(settings)
        runs.lift_b(session)
        m = v = 0.0
        expected = session.session.tensor("master").astype(np.float64)
        for index in range(3):
            session.accumulate(prepared.loader.next_step(), index)
            gradient = session.session.tensor("gradients").astype(np.float64)
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
            corrected = np.sqrt(v / (1 - 0.999 ** (index + 1))) + 1e-8
            expected = expected * (1 - 1e-3) - 1e-2 * (m / (1 - 0.9 ** (index + 1))) / corrected
            session.update(index, 1e-2)
            np.testing.assert_allclose(session.session.tensor("master"), expected, rtol=2e-5, atol=2e-6)
