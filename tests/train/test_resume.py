"""Runs that are stopped, killed, starved of disk or poisoned, and go on as if nothing had happened, or say why not."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from surogate_core.config import dump_resolved
from surogate_core.errors import ConfigError, DataError, SurogateError, TrainingError
from surogate_core.train import checkpoint as checkpoints
from surogate_core.train.trainer import Trainer

from . import runs

WORKER = Path(__file__).with_name("worker.py")
SETTINGS = dict(recipe="bf16", lora_dropout=0.25, num_epochs=2, save_steps=3, lr_scheduler_type="cosine", warmup_steps=3)


def stop_after(monkeypatch, step: int) -> None:
    """As one Ctrl-C during that step."""
    whole = Trainer._one_step

    def one_step(self):
        record = whole(self)
        if record is not None and record["step"] == step:
            self._interrupt(signal.SIGINT, None)
        return record

    monkeypatch.setattr(Trainer, "_one_step", one_step)


def crash_in(monkeypatch, step: int) -> None:
    """As a process that dies in that step: nothing is saved any more."""
    whole = Trainer._one_step

    def one_step(self):
        if self.step + 1 == step:
            raise RuntimeError("crash")
        return whole(self)

    monkeypatch.setattr(Trainer, "_one_step", one_step)


@pytest.fixture(scope="module")
def reference(shared):
    """Of a run that nobody stopped: the final tensors, and the metrics."""
    runs.run(runs.config(shared, output_dir=str(shared / "reference"), **SETTINGS))
    return runs.final_state(shared / "reference"), runs.course(shared / "reference")


class TestResume:
    @pytest.mark.parametrize("stop", [1, 6, 7, 13])
    def test_stopping_and_going_on_is_one_run(self, root, reference, monkeypatch, stop):
        settings = runs.config(root, **SETTINGS)
        with monkeypatch.context() as patch:
            stop_after(patch, stop)
            result = runs.run(settings)
        assert result.status == "interrupted" and result.steps == stop
        assert (root / "out" / "adapter" / "adapter_config.json").is_file()
        result = runs.run(settings)
        assert result.status == "completed"
        assert runs.final_state(root / "out") == reference[0]
        assert runs.course(root / "out") == reference[1]

    def test_a_checkpoint_is_not_ahead_of_what_was_trained(self, root, monkeypatch):
        """The next step's batches are drawn before a step has ended; the place that is saved is before them."""
        prepared, _ = runs.open_run(runs.config(root))
        for _ in range(3):
            prepared.loader.next_step()
        stop_after(monkeypatch, 3)
        runs.run(runs.config(root))
        saved = checkpoints.list_checkpoints(root / "out")[-1].info
        assert (saved["step"], saved["loader"]) == (3, prepared.loader.state_dict())

    def test_steps_after_the_last_checkpoint_are_done_again(self, root, reference, monkeypatch):
        settings = runs.config(root, **SETTINGS)
        for step in (5, 8, 14):
            with monkeypatch.context() as patch:
                crash_in(patch, step)
                with pytest.raises(RuntimeError, match="crash"):
                    runs.run(settings)
        runs.run(settings)
        assert runs.final_state(root / "out") == reference[0]
        assert runs.course(root / "out") == reference[1]

    def test_full_fine_tuning_too(self, root, monkeypatch):
        changes = dict(lora=False, learning_rate=1e-3, recipe="bf16")
        runs.run(runs.config(root, output_dir=str(root / "reference"), **changes))
        with monkeypatch.context() as patch:
            stop_after(patch, 3)
            runs.run(runs.config(root, **changes))
        runs.run(runs.config(root, **changes))
        assert runs.final_state(root / "out") == runs.final_state(root / "reference")
        assert runs.course(root / "out") == runs.course(root / "reference")

    def test_from_an_earlier_checkpoint(self, root, reference):
        """Later ones and their metrics are of a course that was left."""
        settings = runs.config(root, save_total_limit=None, **SETTINGS)
        runs.run(settings)
        again = runs.config(root, save_total_limit=3, resume_from_checkpoint=str(root / "out" / "step_00000003"), **SETTINGS)
        result = runs.run(again)
        assert [r["step"] for r in result.history] == list(range(4, 15))
        assert runs.final_state(root / "out") == reference[0] and runs.course(root / "out") == reference[1]
        assert [c.step for c in checkpoints.list_checkpoints(root / "out")] == [9, 12, 14]

    def test_a_finished_run_has_nothing_left_to_do(self, root):
        runs.run(runs.config(root))
        before = runs.records(root / "out")
        result = runs.run(runs.config(root))
        assert result.status == "completed" and result.history == [] and result.steps == 7
        assert runs.records(root / "out") == before

    def test_more_epochs_go_on_from_where_it_ended(self, root):
        settings = dict(lr_scheduler_type="constant")
        runs.run(runs.config(root, **settings))
        result = runs.run(runs.config(root, num_epochs=2, **settings))
        assert [r["step"] for r in result.history] == list(range(8, 15))

    def test_resume_false_does_not_overwrite(self, root):
        runs.run(runs.config(root))
        with pytest.raises(ConfigError, match="has checkpoints of an earlier run"):
            runs.run(runs.config(root, resume_from_checkpoint=False))

    def test_a_checkpoint_that_is_none(self, root):
        with pytest.raises(TrainingError, match="is not a checkpoint"):
            runs.run(runs.config(root, resume_from_checkpoint=str(root / "out" / "step_00000009")))

    @pytest.mark.parametrize(("changes", "reason"), [
        ({"lora_rank": 8, "lora_alpha": 64.0}, "has shape"), ({"lora_target_modules": ["q_proj"]}, "also has"),
        ({"lora": False}, "lora"),
        ({"lora_alpha": 8.0}, "another lora scale"), ({"seed": 5}, "seed"), ({"sequence_len": 128}, "sequence_len"),
        ({"gradient_accumulation_steps": 1}, "accumulation"),
    ])
    def test_a_checkpoint_of_other_settings_is_refused(self, root, changes, reason):
        runs.run(runs.config(root))
        with pytest.raises((TrainingError, DataError), match=reason):
            runs.run(runs.config(root, num_epochs=2, **changes))

    def test_changed_data_is_refused(self, root):
        runs.run(runs.config(root))
        runs.write_rows(root / "chat.jsonl", runs.chats(24, seed=1))
        with pytest.raises(DataError, match="these changed: .*dataset"):
            runs.run(runs.config(root, num_epochs=2))

    @pytest.mark.parametrize("keep", [0, 100, -1])
    def test_a_damaged_checkpoint_is_an_error_of_ours(self, root, keep):
        runs.run(runs.config(root))
        state = root / "out" / "step_00000007" / "state.safetensors"
        state.write_bytes(state.read_bytes()[:keep])
        with pytest.raises(SurogateError, match="state.safetensors"):
            runs.run(runs.config(root, num_epochs=2))


class TestCheckpoints:
    def test_the_limit_keeps_the_newest(self, root):
        runs.run(runs.config(root, save_steps=1, save_total_limit=3))
        assert [c.step for c in checkpoints.list_checkpoints(root / "out")] == [5, 6, 7]

    def test_half_a_checkpoint_is_none_and_is_cleared_away(self, root):
        settings = runs.config(root, save_steps=2)
        half = root / "out" / ".step_00000002.tmp"
        half.mkdir(parents=True)
        (half / "state.safetensors").write_bytes(b"half")
        (root / "out" / "step_00000009").mkdir()
        result = runs.run(settings)
        assert [r["step"] for r in result.history] == list(range(1, 8))
        assert not half.exists()

    def test_parameters_and_states_by_name(self, root):
        runs.run(runs.config(root, lora_target_modules=["q_proj"]))
        names = set(runs.final_state(root / "out")) - {"step_00000007"}
        assert names == {f"{state}/layers.{i}.attn.q.lora_{half}" for state in ("master", "optimizer.m", "optimizer.v")
                         for i in (0, 1) for half in "ab"}

    @pytest.mark.parametrize("where", ["state", "info", "rename"])
    def test_a_save_that_fails_leaves_the_one_before(self, root, monkeypatch, where):
        """The system refuses a write: an error of ours that names the checkpoint which is whole; then the run goes on."""
        settings = runs.config(root, save_steps=3)
        prepared, session = runs.open_run(settings)
        folder = root / "out"
        checkpoints.save(folder, 3, session, {"x": 1}, 5)

        def full(*args, **named):
            raise OSError(28, "No space left on device")

        target = {"state": (checkpoints, "write_file"), "info": (checkpoints, "write_json"), "rename": (os, "rename")}[where]
        with monkeypatch.context() as patch:
            patch.setattr(*target, full)
            with pytest.raises(TrainingError, match="cannot write checkpoint .*step_00000006: No space left") as caught:
                checkpoints.save(folder, 6, session, {"x": 2}, 1)
        assert "step_00000003" in caught.value.hint
        assert [p.name for p in folder.iterdir()] == ["step_00000003"]
        checkpoints.load(checkpoints.list_checkpoints(folder)[0], session)
        checkpoints.save(folder, 6, session, {"x": 2}, 1)
        assert [p.name for p in folder.iterdir()] == ["step_00000006"]

    def test_files_that_may_grow_no_further(self, root):
        """The real thing: the system's limit on file sizes, in a process of its own."""
        settings = runs.config(root, **{**SETTINGS, "save_steps": 2})
        dump_resolved(settings, root / "run.yaml")
        size = 20_000  # of metrics, not of a checkpoint

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

        done = subprocess.run([sys.executable, WORKER, root / "run.yaml"], preexec_fn=limited, capture_output=True, text=True)
        assert done.returncode == 1
        assert "cannot write checkpoint" in done.stderr and "Traceback" not in done.stderr
        assert checkpoints.list_checkpoints(root / "out") == []
        assert [r["step"] for r in runs.records(root / "out")] == [1, 2]


class TestKilled:
    """In processes of their own."""

    def start(self, root: Path, *words: object) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, WORKER, root / "run.yaml", *map(str, words)], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)

    def wait_for(self, path: Path, lines: int, process: subprocess.Popen) -> None:
        for _ in range(3000):
            if path.exists() and path.read_text().count("\n") >= lines:
                return
            if process.poll() is not None:
                raise AssertionError(process.stdout.read())
            time.sleep(0.005)
        raise AssertionError(f"{path} has not got {lines} lines")

    def test_kill_at_any_moment(self, root, reference):
        """Three times, at moments that the clock decides; then the end is the end of the run that nobody stopped."""
        dump_resolved(runs.config(root, **{**SETTINGS, "save_steps": 1}), root / "run.yaml")
        generator = random.Random()
        for lines in (2, 6, 10):
            process = self.start(root, 10)
            self.wait_for(root / "out" / "metrics.jsonl", lines, process)
            time.sleep(generator.uniform(0, 0.03))
            process.kill()
            process.wait()
            process.stdout.close()
            assert checkpoints.list_checkpoints(root / "out")
        result = runs.run(runs.config(root, **{**SETTINGS, "save_steps": 1}))
        assert result.status == "completed" and len(result.history) < 12
        assert runs.final_state(root / "out") == reference[0]
        assert runs.course(root / "out") == reference[1]

    @pytest.mark.parametrize("moment", ["state", "rename", "removal"])
    def test_kill_in_the_midst_of_a_save(self, root, reference, moment):
        settings = runs.config(root, save_total_limit=1, **SETTINGS)
        dump_resolved(settings, root / "run.yaml")
        process = self.start(root, 0, moment)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, output
        kept = [c.step for c in checkpoints.list_checkpoints(root / "out")]
        assert kept == [6] if moment == "removal" else kept == [3]
        runs.run(settings)
        assert runs.final_state(root / "out") == reference[0]
        assert runs.course(root / "out") == reference[1]
        assert not list((root / "out").glob(".step*"))

    def test_control_c_saves_and_ends_with_130(self, root, reference):
        dump_resolved(runs.config(root, **SETTINGS), root / "run.yaml")
        process = self.start(root, 30)
        self.wait_for(root / "out" / "metrics.jsonl", 2, process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 130, output
        assert "interrupted after step" in output and "Traceback" not in output
        done = checkpoints.list_checkpoints(root / "out")[-1].step
        assert 2 <= done < 14 and len(runs.records(root / "out")) == done
        assert (root / "out" / "adapter" / "adapter_model.safetensors").is_file()
        runs.run(runs.config(root, **SETTINGS))
        assert runs.final_state(root / "out") == reference[0] and runs.course(root / "out") == reference[1]


class TestMetrics:
    def test_a_line_that_a_crash_cut_is_dropped(self, root, reference, monkeypatch):
        settings = runs.config(root, **SETTINGS)
        with monkeypatch.context() as patch:
            crash_in(patch, 5)
            with pytest.raises(RuntimeError):
                runs.run(settings)
        with (root / "out" / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 5, "loss": 4.\xe2\x82')
        runs.run(settings)
        assert runs.course(root / "out") == reference[1]

    def test_csv_goes_on_too(self, root, monkeypatch):
        settings = runs.config(root, report_to=["csv"], save_steps=2)
        with monkeypatch.context() as patch:
            crash_in(patch, 6)
            with pytest.raises(RuntimeError):
                runs.run(settings)
        runs.run(settings)
        lines = (root / "out" / "metrics.csv").read_text().splitlines()
        assert [line.split(",")[0] for line in lines] == ["step", *map(str, range(1, 8))]

    def test_a_full_disk_is_an_error_of_ours(self, tmp_path):
        from surogate_core.train.trackers import JsonLines

        metrics = JsonLines(tmp_path / "metrics.jsonl", 1)
        metrics._file.close()
        metrics._file = open("/dev/full", "wb", buffering=0)
        with pytest.raises(TrainingError, match="cannot write .*metrics.jsonl: No space left"):
            metrics.write({"step": 1})
        metrics.close()

    @pytest.mark.parametrize("method", ["log", "finish"])
    def test_a_tracker_that_fails_is_dropped_with_a_line(self, root, monkeypatch, method):
        from surogate_core.train import trackers

        def broken(self, *arguments):
            raise ConnectionError("no network")

        monkeypatch.setattr(trackers.CsvTracker, method, broken)
        screen = runs.console()
        result = runs.run(runs.config(root, report_to=["csv"]), screen=screen)
        assert result.steps == 7
        assert runs.shown(screen).count("tracker csv failed and is dropped: no network") == 1


class TestNotFinite:
    def test_a_loss_that_is_not_a_number_stops_and_names_the_rows(self, root, monkeypatch):
        settings = runs.config(root, save_steps=2)
        whole = Trainer._one_step

        def poisoned(self):
            if self.step == 4:
                self.session.session.tensor("master")[:] = np.nan
                self.session.refresh()
            return whole(self)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_one_step", poisoned)
            with pytest.raises(TrainingError, match=r"the loss of step 5 is nan; its batch holds .*chat\.jsonl:\d+") as caught:
                runs.run(settings)
        assert "step_00000004" in caught.value.hint
        assert [r["step"] for r in runs.records(root / "out")] == [1, 2, 3, 4]
        runs.run(settings)
        runs.run(runs.config(root, output_dir=str(root / "reference")))
        assert runs.course(root / "out") == runs.course(root / "reference")

    def test_an_infinite_gradient_too(self, root, monkeypatch):
        from surogate_core.train.session import TrainSession

        monkeypatch.setattr(TrainSession, "grad_norm", lambda self: float("inf"))
        with pytest.raises(TrainingError, match="the gradient norm of step 1 is inf.*chat.jsonl") as caught:
            runs.run(runs.config(root))
        assert "No checkpoint was written yet" in caught.value.hint


def test_a_step_without_targets_is_skipped_and_told(root):
    """It counts as no step, moves nothing, and is never a loss of 0."""
    settings = runs.config(root, sample_packing=False, num_epochs=1)
    prepared, session = runs.open_run(settings)
    dataset, told = prepared.loader.dataset, []
    first = prepared.loader._order(0)[:2]
    for document in first:
        dataset.weights[dataset.offsets[document]:dataset.offsets[document + 1]] = 0
    (root / "out").mkdir()
    trainer = Trainer(prepared, session, told.append)
    before = session.session.tensor("master").copy()
    assert trainer._one_step() is None and trainer.step == 0
    assert np.array_equal(session.session.tensor("master"), before)
    assert len(told[0]["skipped"]) == 2 and "chat.jsonl" in told[0]["skipped"][0]
    result = trainer.run()
    assert result.steps == prepared.total_steps and all(r["loss"] > 1 for r in result.history)


def test_control_c_twice_ends_at_once(root):
    prepared, session = runs.open_run(runs.config(root))
    trainer = Trainer(prepared, session, print)
    trainer._interrupt(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        trainer._interrupt(signal.SIGINT, None)


def test_the_info_of_a_checkpoint_is_json(root):
    runs.run(runs.config(root))
    info = json.loads((root / "out" / "step_00000007" / "checkpoint.json").read_text())
    assert info["step"] == 7 and info["loader"]["epoch"] == 0
