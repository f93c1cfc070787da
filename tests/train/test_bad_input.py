"""Bad data and bad models, from the configuration to the message."""

from __future__ import annotations

import json

import pytest

from surogate_core.config import resolve
from surogate_core.errors import ConfigError, DataError, WeightError

from . import runs

LONG = {"messages": [{"role": "user", "content": "tell"}, {"role": "assistant", "content": runs.text_of(1, 60)}]}


class TestOverlong:
    @pytest.fixture
    def rows(self, root):
        return runs.write_rows(root / "chat.jsonl", [*runs.chats(6), LONG])

    def ledger(self, root, **changes):
        prepared, _ = runs.open_run(runs.config(root, **changes))
        dataset = prepared.loader.dataset
        (ledger,) = dataset.ledgers.values()
        assert ledger.balances and ledger.rows_overlong == 1
        return ledger, dataset

    def test_drop(self, root, rows):
        ledger, dataset = self.ledger(root, overlong="drop")
        assert ledger.rows_dropped == 1 and len(dataset) == 6
        assert runs.run(runs.config(root, overlong="drop")).status == "completed"

    def test_truncate(self, root, rows):
        ledger, dataset = self.ledger(root, overlong="truncate")
        assert len(dataset) == 7 and int(dataset.lengths.max()) == 96 and ledger.tokens_truncated > 100
        assert runs.run(runs.config(root, overlong="truncate")).status == "completed"

    def test_split(self, root, rows):
        ledger, dataset = self.ledger(root, overlong="split")
        assert len(dataset) > 8 and ledger.tokens_truncated == 0 and ledger.rows_dropped == 0
        assert runs.run(runs.config(root, overlong="split")).status == "completed"

    def test_error(self, root, rows):
        with pytest.raises(DataError, match=r"chat\.jsonl:7: \d+ tokens, more than sequence_len 96"):
            runs.run(runs.config(root, overlong="error"))
        assert not (root / "out" / "metrics.jsonl").exists()


class TestRows:
    def test_rows_without_a_supervised_token_are_left_out_and_counted(self, root):
        mute = {"messages": [{"role": "user", "content": "anybody there?"}]}
        runs.write_rows(root / "chat.jsonl", [mute, *runs.chats(4), mute, mute])
        screen = runs.console()
        result = runs.run(runs.config(root), screen=screen)
        assert result.status == "completed"
        assert "3 of 7 rows have no supervised token" in runs.shown(screen)

    def test_nothing_but_such_rows(self, root):
        runs.write_rows(root / "chat.jsonl", [{"messages": [{"role": "user", "content": "hello?"}]}] * 3)
        with pytest.raises(DataError, match="no row is left to train on: 3 read, 0 bad, 3 without a supervised token"):
            runs.run(runs.config(root))

    def test_a_line_cut_in_half_stops_with_its_place(self, root):
        whole = [json.dumps(row) for row in runs.chats(4)]
        (root / "chat.jsonl").write_text("\n".join([*whole[:3], whole[3][:40]]))
        with pytest.raises(DataError, match=r"chat\.jsonl:4") as caught:
            runs.run(runs.config(root))
        assert not (root / "out" / "metrics.jsonl").exists()
        assert "quarantine" in str(caught.value)

    def test_or_is_set_aside_and_counted_where_that_is_asked(self, root):
        whole = [json.dumps(row) for row in runs.chats(4)]
        (root / "chat.jsonl").write_text("\n".join([whole[0], whole[1][:40], "[1, 2]", *whole[2:]]) + "\n")
        screen = runs.console()
        result = runs.run(runs.config(root, bad_rows="quarantine"), screen=screen)
        assert result.status == "completed"
        assert "2 of 5 rows are bad and were set aside in" in runs.shown(screen) and "bad_rows.jsonl" in runs.shown(screen)
        held = [json.loads(line) for line in (root / "out" / "bad_rows.jsonl").read_text().splitlines()]
        assert [row["where"].rsplit(":", 1)[1] for row in held] == ["2", "3"]

    def test_an_empty_file(self, root):
        (root / "chat.jsonl").write_text("")
        with pytest.raises(DataError, match="chat.jsonl"):
            runs.run(runs.config(root))

    def test_columns_of_no_format(self, root):
        runs.write_rows(root / "chat.jsonl", [{"frage": "a", "antwort": "b"}])
        with pytest.raises(DataError, match="frage"):
            runs.run(runs.config(root))


class TestModels:
    def test_no_such_file(self, root):
        (root / "run.yaml").write_text(f"model: nowhere.gguf\ndatasets: {root / 'chat.jsonl'}\n")
        with pytest.raises(ConfigError, match="nowhere.gguf"):
            resolve(root / "run.yaml")
        with pytest.raises(WeightError, match="nowhere"):
            runs.run(runs.config(root, model=str(root / "nowhere")))

    def test_an_unknown_architecture_names_the_known_ones(self, root):
        folder = runs.write_model(root / "odd")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
        with pytest.raises(WeightError, match="'MambaForCausalLM' belongs to no installed family; known: .*Llama"):
            runs.run(runs.config(root, model=str(folder)))

    def test_a_missing_tensor_and_a_wrong_shape(self, root):
        folder = runs.write_model(root / "odd")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
        with pytest.raises(WeightError, match="layers.2"):
            runs.run(runs.config(root, model=str(folder)))
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
        with pytest.raises(WeightError, match="shape|48"):
            runs.run(runs.config(root, model=str(folder)))

    def test_truncated_weights(self, root):
        folder = runs.write_model(root / "odd")
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        with pytest.raises(WeightError, match="model.safetensors"):
            runs.run(runs.config(root, model=str(folder)))

    def test_a_token_beyond_the_vocabulary(self, root):
        """A tokenizer of another model: named before anything is read out of bounds."""
        folder = runs.write_model(root / "small", vocab_size=200)
        with pytest.raises(DataError, match="vocab"):
            runs.run(runs.config(root, model=str(folder)))


def test_an_output_folder_that_cannot_be_made(root):
    (root / "taken").write_text("a file")
    with pytest.raises(ConfigError, match="output_dir .*taken/out cannot be made"):
        runs.run(runs.config(root, output_dir=str(root / "taken" / "out")))


def test_documents_longer_than_the_model_was_made_for_are_told(root):
    folder = runs.write_model(root / "short", max_position_embeddings=16)
    screen = runs.console()
    runs.run(runs.config(root, model=str(folder)), screen=screen)
    assert "the model was made for 16 positions" in runs.shown(screen)
