"""Packing and the loader: shapes, shifts, positions, normalisation, order, exact resume."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_core.data import IGNORED, Loader, TokenDataset
from surogate_core.data.packing import one_each, pack
from surogate_core.errors import DataError


def dataset(documents, masked=()):
    """documents: lists of ids. masked: (document, position) that are no targets."""
    weights = [[0.0] + [1.0] * (len(ids) - 1) for ids in documents]
    for document, position in masked:
        weights[document][position] = 0.0
    return TokenDataset(np.array(sum(documents, []), np.int32), np.array(sum(weights, []), np.float32),
                        np.cumsum([0, *map(len, documents)]), [f"f:{i + 1}" for i in range(len(documents))],
                        ["f"] * len(documents))


def many(count=37, longest=10, seed=0):
    rng = np.random.default_rng(seed)
    return dataset([(100 * (i + 1) + np.arange(rng.integers(2, longest + 1))).tolist() for i in range(count)])


def loader(data, **options):
    return Loader(data, **{"sequence_len": 10, "pad_token_id": 7, **options})


@given(lengths=st.lists(st.integers(1, 13), max_size=60), seed=st.integers(0, 3), shuffle=st.booleans())
@settings(max_examples=60, deadline=None)
def test_packing_keeps_every_document_once_and_no_bin_overflows(lengths, seed, shuffle):
    bins = pack(lengths, 13, seed, shuffle)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in each) <= 13 for each in bins)
    assert sum(sum(lengths[i] for i in each) <= 6 for each in bins) <= 1  # two such bins would have been one
    assert bins == pack(lengths, 13, seed, shuffle)


def test_packing_refuses_what_cannot_fit_instead_of_looping():
    with pytest.raises(ValueError, match="document 1 has 14 tokens, a bin holds 13"):
        pack([13, 14], 13)
    assert one_each([3, 2], 13) == [[0], [1]]


def test_targets_shift_within_each_document_only():
    batch = loader(dataset([[1, 2, 3], [4, 5]]), shuffle=False).next_step()[0]
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5] + [7] * 5
    assert batch.targets.tolist() == [2, 3, IGNORED, 5] + [IGNORED] * 6
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]
    assert batch.doc_starts.tolist() == [0, 3, 5, 10]
    assert (batch.num_targets, batch.useful_tokens, batch.rows) == (3, 5, ["f:1", "f:2"])
    assert {a.dtype.name for a in (batch.tokens, batch.targets, batch.positions, batch.doc_starts)} == {"int32"}


def test_masks_follow_the_length_not_the_pad_id():
    batch = loader(dataset([[5, 6, 7]]), shuffle=False).next_step()[0]  # the pad id occurs as a real token
    assert batch.targets.tolist()[:3] == [6, 7, IGNORED] and batch.num_targets == 2


def test_pad_id_zero_and_no_pad_id():
    for pad in (0, None):
        assert loader(dataset([[5, 6]]), pad_token_id=pad).next_step()[0].tokens[2:].tolist() == [0] * 8


def test_masked_tokens_are_no_targets_but_stay_in_the_text():
    batch = loader(dataset([[1, 2, 3, 4]], masked=[(0, 1)]), shuffle=False).next_step()[0]
    assert batch.targets.tolist()[:4] == [IGNORED, 3, 4, IGNORED] and batch.tokens.tolist()[:4] == [1, 2, 3, 4]


def test_token_weights_divide_by_the_targets_of_the_whole_step():
    """Micro-batches with 1 and 3 targets of loss 4 and 1: (4 + 3) / 4, not the mean of their means."""
    data = dataset([[1, 2], [3, 4, 5, 6]])
    step = loader(data, shuffle=False, sample_packing=False, gradient_accumulation_steps=2).next_step()
    losses = [np.where(batch.targets >= 0, loss, 0.0) for batch, loss in zip(step, (4.0, 1.0), strict=True)]
    assert sum(float((loss * batch.token_weights).sum()) for loss, batch in zip(losses, step, strict=True)) == 1.75
    assert step.num_targets == 4 and step.weight_sum == 4.0


def test_weights_of_rows_count_in_numerator_and_denominator():
    data = dataset([[1, 2, 3]])
    data.weights[:] = [0, 0.5, 2]
    step = loader(data).next_step()
    assert step.weight_sum == 2.5 and step[0].num_targets == 2
    assert step[0].token_weights[:3].tolist() == pytest.approx([0.2, 0.8, 0.0])


def test_the_last_step_holds_fewer_micro_batches_and_is_not_dropped():
    data = dataset([[i, i + 1] for i in range(10)])
    loading = loader(data, sample_packing=False, gradient_accumulation_steps=4)
    steps = list(itertools.islice(loading, 3))
    assert loading.steps_per_epoch == 3 and [len(step) for step in steps] == [4, 4, 2]
    assert steps[-1].weight_sum == 2 and steps[-1][0].token_weights.sum() == 0.5
    assert (loading.next_step().epoch, loading.next_step().index) == (1, 1)


def test_an_epoch_sees_every_document_once_and_shapes_never_change():
    data = many()
    loading = loader(data, per_device_train_batch_size=3, gradient_accumulation_steps=2)
    steps = list(itertools.islice(loading, loading.steps_per_epoch))
    batches = [batch for step in steps for batch in step]
    assert sorted(row for batch in batches for row in batch.rows) == sorted(data.rows)
    assert {batch.doc_starts.shape for batch in batches} == {(loading.max_documents + 1,)}
    assert sum(batch.num_targets for batch in batches) == data.num_targets
    padding = sum(loading.num_tokens - batch.useful_tokens for batch in batches)
    assert padding == loading.padding_tokens and len(batches) == loading.micro_batches_per_epoch
    assert loading.packing_efficiency == pytest.approx(len(data.tokens) / (len(batches) * 30))


@pytest.mark.parametrize("packing", [True, False])
def test_every_range_is_one_document_or_padding_and_bins_do_not_touch(packing):
    data = many()
    loading = loader(data, per_device_train_batch_size=4, sample_packing=packing)
    for step in loading.epoch():
        batch = step[0]
        starts = batch.doc_starts.tolist()
        assert starts[0] == 0 and starts == sorted(starts) and starts[-1] == 40
        assert {0, 10, 20, 30} <= set(starts)
        for start, end in itertools.pairwise(starts):
            assert batch.positions[start:end].tolist() == list(range(end - start))
            owners = {int(token) // 100 for token in batch.tokens[start:end] if token != 7}
            assert len(owners) <= 1
            if end > start:
                assert batch.targets[end - 1] == IGNORED


def test_order_depends_on_seed_and_epoch_only():
    def rows(seed, epoch):
        return [row for step in loader(many(), seed=seed).epoch(epoch) for row in step[0].rows]

    assert rows(1, 0) == rows(1, 0) and len({tuple(rows(s, e)) for s in (1, 2) for e in (0, 1)}) == 4


def test_unshuffled_unpacked_order_is_the_files():
    steps = loader(many(), shuffle=False, sample_packing=False).epoch()
    assert [row for step in steps for row in step[0].rows] == many().rows


def test_resume_is_exact_to_the_micro_batch():
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "seed": 5}
    straight = loader(many(), **options)
    count = 2 * straight.steps_per_epoch + 1
    wanted = [[batch.tokens.tolist() for batch in step] for step in itertools.islice(straight, count)]
    for stop in (1, straight.steps_per_epoch, straight.steps_per_epoch + 2):
        first = loader(many(), **options)
        for _ in range(stop):
            first.next_step()
        second = loader(many(), **options)
        second.load_state_dict(first.state_dict())
        rest = itertools.islice(second, count - stop)
        assert [[batch.tokens.tolist() for batch in step] for step in rest] == wanted[stop:]


@pytest.mark.parametrize("change, named", [
    ({"seed": 9}, "seed"), ({"per_device_train_batch_size": 2}, "batch_size"), ({"data": many(36)}, "dataset"),
    ({"gradient_accumulation_steps": 2}, "accumulation")])
def test_resume_with_other_data_or_settings_is_refused(change, named):
    state = loader(many()).state_dict()
    with pytest.raises(DataError, match=f"these changed: .*{named}"):
        loader(change.pop("data", many()), **change).load_state_dict(state)


def test_packed_and_unpacked_hold_the_same_targets():
    def pairs(packing):
        out = []
        for step in loader(many(), sample_packing=packing).epoch():
            here = step[0].targets >= 0
            out += zip(step[0].tokens[here].tolist(), step[0].targets[here].tolist(), step[0].positions[here].tolist(),
                       strict=True)
        return sorted(out)

    assert pairs(True) == pairs(False)


def test_evaluating_leaves_the_training_place_alone():
    loading = loader(many())
    loading.next_step()
    before = loading.state_dict()
    assert sum(1 for _ in loading.epoch(3)) == loading.steps_per_epoch and loading.state_dict() == before


def test_what_cannot_be_loaded_is_said():
    with pytest.raises(DataError, match=r"f:1: 12 tokens, more than sequence_len 10"):
        loader(dataset([list(range(12))]))
    with pytest.raises(DataError, match="gradient_accumulation_steps is 0"):
        loader(many(), gradient_accumulation_steps=0)
