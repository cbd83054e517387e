"""Tests that stopped, damaged or changed runs resume exactly or explain the refusal."""

import json
import logging
import re
import shutil
import subprocess
import sys
import threading
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dpoptax._rounding.block_sums import WholeBatch, tau
from dpoptax.runs import OtherRunError, key_of_words
from dpoptax.training import ConfigError, cache_folder, train_config
from dpoptax.training.cli.main import main
from dpoptax.training.run import checkpoints as checkpoints_module
from dpoptax.training.run import figures, files, resume
from dpoptax.training.run.checkpoints import CheckpointError, Checkpoints
from dpoptax.training.run.program import RunProgram
from dpoptax.training.run.training_loop import TrainingLoop
from experiments.methods import DPSGD, Disk, NonPrivate
from tests.runs import CONFIG


class StoppedError(Exception):
    """A run stopped on purpose."""


def run(workdir, stop_before=None, **changes):
    """Runs all steps, or those before a given step, without drawing a figure.

    Each record is shown before the next step, as if checkpoints were written at once.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "plot_run", lambda *_: None)
        patch.setattr(Checkpoints, "saving", lambda _: False)
        if stop_before is not None:
            advance, count = TrainingLoop.advance, iter(range(stop_before))

            def limited(course, batch):
                if next(count, None) is None:
                    raise StoppedError
                advance(course, batch)

            patch.setattr(TrainingLoop, "advance", limited)
        options = {name: changes.pop(name) for name in {"generator", "mesh"} & changes.keys()}
        config = CONFIG.replace(**changes)
        return train_config.train_and_evaluate(config, workdir, progress=False, **options)


def remove_checkpoints(workdir, *steps):
    """Removes checkpoints of a run by hand, so that it repeats steps that were shown."""
    for step in steps:
        (workdir / "checkpoints" / f"{step}.json").unlink()


def history(workdir):
    """Returns the records of a run."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def outcome(workdir):
    """Returns all parts of a finished run that must not depend on stops."""
    summary = json.loads((workdir / "summary.json").read_text())
    records = [{**entry, "seconds": None} for entry in history(workdir)]
    return summary["params_sha256"], summary["epsilon"], records


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    return run(workdir), workdir


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("stopped")
    with pytest.raises(StoppedError):
        run(workdir, stop_before=5)
    return workdir


@pytest.fixture
def stopped(stopped_once, tmp_path_factory):
    """The directory of a run that was stopped before its sixth step."""
    workdir = tmp_path_factory.mktemp("stopped")
    return shutil.copytree(stopped_once, workdir, dirs_exist_ok=True)


def test_stopped_run_resumes_bit_for_bit(stopped, undisturbed):
    assert not (stopped / "summary.json").exists()
    run(stopped)
    assert outcome(stopped) == outcome(undisturbed[1])
    assert [entry["step"] for entry in history(stopped)] == [0, 2, 4, 6]


def test_finished_run_does_not_change_and_keeps_checkpoints(undisturbed):
    _, workdir = undisturbed
    before = outcome(workdir)
    kept = sorted(path.name for path in (workdir / "checkpoints").iterdir())
    assert kept == ["2.json", "4.json", "6.json"]
    assert (workdir / "checkpoints").stat().st_mode & 0o077 == 0
    run(workdir)
    assert outcome(workdir) == before


def test_does_not_repeat_shown_steps_with_other_sums(stopped, monkeypatch):
    (stopped / "checkpoints" / "4.json").unlink()  # step 4 was shown and is repeated from step 2
    monkeypatch.setattr(resume, "rounding", lambda *_, **__: {"rows": 64})
    with pytest.raises(ValueError, match="Step 4 was shown, .* is of step 2.* same noise"):
        run(stopped)
    monkeypatch.undo()
    assert run(stopped)["steps"] == 6


def test_records_rounding_of_sums(undisturbed):
    with Checkpoints(undisturbed[1] / "checkpoints") as checkpoints:
        recorded = checkpoints.newest_record()["identity"]["rounding"]
    summary, rows = undisturbed[0], recorded["rows"]
    assert (rows, recorded["devices"]) == (summary["padded_size"], 8)
    assert recorded.items() >= summary["versions"].items()  # NumPy draws batches
    # Numbers of devices that the record may treat as equal, and one that it must not.
    assert tau(WholeBatch(rows)) == tau(WholeBatch(rows, 8)) < tau(WholeBatch(rows, 64))


def test_records_order_of_sums_in_fixed_point():
    """Devices sum in another order: an observer of every bit would see two sums with one noise."""
    two = types.SimpleNamespace(size=2, devices=np.array(jax.devices()))
    found = []
    for fixed_point in (False, True):
        sampler = CONFIG.task(method=DPSGD(), fixed_point=fixed_point).plan.sampler
        found.append([resume.rounding(sampler, m, exact=fixed_point) for m in (None, two)])
    (rounded, rounded_by_two), (exact, exact_by_two) = found
    assert rounded == rounded_by_two
    assert (exact["devices"], exact_by_two["devices"]) == (1, 2)
    assert exact["hosts"] == 1


def test_fixed_point_repeats_no_shown_step(tmp_path):
    exact = {"method": DPSGD(), "fixed_point": True, "eval_every": 1, "checkpoint_every": 6}
    with pytest.raises(StoppedError):
        run(tmp_path / "run", stop_before=2, **exact)
    kept = shutil.copytree(tmp_path / "run", tmp_path / "kept")
    remove_checkpoints(kept, 2)
    shown = (kept / "metrics.jsonl").read_text()
    with pytest.raises(OtherRunError, match="got step 2 and a last checkpoint of step 1"):
        run(kept, **exact)
    assert (kept / "metrics.jsonl").read_text() == shown
    assert run(tmp_path / "run", **exact)["steps"] == 6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_enable_x64", True),
        ("jax_threefry_partitionable", False),
        ("jax_default_matmul_precision", "highest"),
        ("jax_default_prng_impl", "rbg"),
    ],
)
def test_refuses_other_settings_with_same_noise(name, value, undisturbed):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        with pytest.raises(OtherRunError, match=f"^`{name}` must be {before!r}, .* got {value!r}"):
            run(undisturbed[1])
    finally:
        jax.config.update(name, before)


def test_remembers_shown_steps_if_later_start_stops_earlier(tmp_path, monkeypatch):
    """The second of three starts stops before step 2, which the first one showed."""
    rare = {"eval_every": 1, "checkpoint_every": 6}
    with pytest.raises(StoppedError):
        run(tmp_path, stop_before=2, **rare)
    remove_checkpoints(tmp_path, 1, 2)
    with pytest.raises(StoppedError):
        run(tmp_path, stop_before=1, **rare)
    monkeypatch.setattr(resume, "rounding", lambda *_, **__: {"rows": 64})
    with pytest.raises(ValueError, match="Step 2 was shown, .* is of step 1"):
        run(tmp_path, **rare)


def test_refuses_to_end_before_a_shown_step(tmp_path, undisturbed):
    """A run that ends before a shown step is refused: its ε would omit released steps."""
    rare = {"eval_every": 1, "checkpoint_every": 6}
    with pytest.raises(StoppedError):
        run(tmp_path, stop_before=2, **rare)
    remove_checkpoints(tmp_path, 1, 2)
    with pytest.raises(ValueError, match="`steps` must be at least 2"):
        run(tmp_path, steps=1, **rare)
    with pytest.raises(ValueError, match="`steps` must be at least 2"):
        run(tmp_path, epsilon=0.99 * history(undisturbed[1])[1]["epsilon"], **rare)
    assert run(tmp_path, steps=2, **rare)["steps"] == 2


def test_run_without_seed_resumes_with_its_drawn_key(tmp_path):
    with pytest.raises(StoppedError):
        run(tmp_path, stop_before=3, seed=None)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        key = checkpoints.newest_record()["key"]
    summary = run(tmp_path, seed=None)
    assert (summary["steps"], summary["assumed_secret"]) == (6, [])
    assert "seed" not in summary["config"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_config.seeds, "key_of", lambda *_: key_of_words(np.uint32(key)))
        run(tmp_path / "again", seed=0)
    assert outcome(tmp_path) == outcome(tmp_path / "again")


def test_given_seed_stays_an_assumed_secret(tmp_path, undisturbed):
    before = outcome(undisturbed[1])
    assert undisturbed[0]["assumed_secret"] == ["seed"]
    assert run(undisturbed[1], seed=None)["assumed_secret"] == ["seed"]
    assert outcome(undisturbed[1]) == before
    with pytest.raises(StoppedError):
        run(tmp_path, stop_before=3)
    assert run(tmp_path, seed=None)["assumed_secret"] == ["seed"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampling": "fixed_size"}, "`sampler` must be"),
        ({"microbatch_size": 8}, "`sampler`, with its draws, must be the same"),
        ({"seed": 1}, "The noise key must be the same"),
        ({"method": Disk(kappa=0.6)}, "`optimizer` must be the same"),
        ({"method": NonPrivate()}, "The key of the run must be the same"),
        ({"clip": "auto_s"}, "`clip` must be"),
        ({"model": "mlp"}, "`optimizer` must be the same"),
        ({"delta": 1e-9}, "`delta` must be 1e-05"),  # metrics.jsonl would mix two values of ε
    ],
)
def test_refuses_to_resume_with_other_config(undisturbed, changes, named):
    with pytest.raises(OtherRunError, match=f"^{named}"):
        run(undisturbed[1], **changes)


def test_budget_holds_across_restarts(tmp_path, undisturbed):
    _, first, second, _ = (entry["epsilon"] for entry in history(undisturbed[1]))
    budget = (first + second) / 2  # room for 2 or 3 steps
    permitted = run(tmp_path / "whole", epsilon=budget)["steps"]
    assert permitted in (2, 3)
    with pytest.raises(StoppedError):
        run(tmp_path / "parts", stop_before=1, epsilon=budget)
    summary = run(tmp_path / "parts", epsilon=budget)
    assert summary["steps"] == permitted
    assert summary["stopped_by_budget"]
    assert summary["epsilon"] <= budget
    # With a larger budget it continues; a budget that is already spent is refused.
    assert run(tmp_path / "parts")["steps"] == 6
    with pytest.raises(ValueError, match=r"which the run has spent in 6 steps"):
        run(tmp_path / "parts", epsilon=budget)


def _flip(content):
    """Returns the content with one bit changed, in the middle."""
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    return bytes(changed)


DAMAGES = {
    "removed": lambda content: None,
    "truncated": lambda content: content[: len(content) // 2],
    "flipped": _flip,
    "text": lambda content: b"not a checkpoint",
}


def _damage(path, kind="truncated"):
    content = DAMAGES[kind](path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)


def _files(folder):
    """Returns the files of the checkpoint of step 6."""
    every = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [file for file in every if file.parts[0] in ("6", "6.json")]


@pytest.fixture(scope="module")
def undisturbed_arrays(tmp_path_factory):
    """An undisturbed run whose arrays count as large, so that orbax stores them as arrays."""
    workdir = tmp_path_factory.mktemp("arrays")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints_module, "_SMALL", -1)
        return run(workdir), workdir


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begun", "fewest", "damage"),
    [
        # A run without its newest checkpoint continues from the one before.
        *(("undisturbed", 1, damage) for damage in DAMAGES if damage != "removed"),
        # A changed bit of a large array is not found.
        *(("undisturbed_arrays", 6, damage) for damage in DAMAGES if damage != "flipped"),
    ],
)
def test_reports_damage_to_any_file_of_a_checkpoint(damage, begun, fewest, request, tmp_path):
    workdir, like = request.getfixturevalue(begun)[1], _state_like()
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        want = checkpoints.restore(like)
    paths = _files(workdir / "checkpoints")
    assert len(paths) >= fewest
    reported = 0
    for number, file in enumerate(paths):
        copy = tmp_path / str(number) / "checkpoints"
        shutil.copytree(workdir / "checkpoints", copy)
        _damage(copy / file, damage)
        found, error = want, ""  # of a file that does not affect the values
        with Checkpoints(copy) as checkpoints:
            try:
                found = checkpoints.restore(like)
            except CheckpointError as raised:
                error = str(raised)
        assert not error or re.search(
            r"/6(\.json)? cannot be read .* to continue from step 4", error
        )
        reported += bool(error)
        assert found[1] == want[1]
        jax.tree.map(_assert_same, found[0], want[0])
    assert reported >= fewest / 3


def test_small_arrays_are_stored_in_one_file(undisturbed, undisturbed_arrays, tmp_path):
    """Both forms hold the same bits, and a run may change from one to the other."""
    small, large = undisturbed[1] / "checkpoints", undisturbed_arrays[1] / "checkpoints"
    assert len(_files(small)) == 1
    assert len(_files(large)) > 4
    found = []
    for folder in (small, large):
        with Checkpoints(folder) as checkpoints:
            assert "arrays" not in checkpoints.newest_record()
            found.append(checkpoints.restore(_state_like()))
    jax.tree.map(_assert_same, found[0][0], found[1][0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints_module, "_SMALL", -1)
        with pytest.raises(StoppedError):
            run(tmp_path, stop_before=3)
    run(tmp_path)
    assert outcome(tmp_path) == outcome(undisturbed[1])


@pytest.mark.parametrize("small", [2**20, -1])
def test_checkpoint_restores_every_type_and_sharding(small, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints_module, "_SMALL", small)
    numbers = np.array([[0.0, -0.0], [np.nan, 1e-40]])
    keys = jax.random.split(jax.random.key(3), 2)
    state = {
        **{name: jax.numpy.asarray(numbers, name) for name in ("float32", "bfloat16", "float16")},
        "integers": jax.numpy.asarray([2**31 - 1, -(2**31)], jax.numpy.int32),
        "scalar": jax.numpy.asarray(7, jax.numpy.uint32),
        "mask": jax.numpy.asarray([True, False]),
        "empty": jax.numpy.zeros((0, 3)),
        "keys": keys,
        "unsafe": jax.random.key(3, impl="unsafe_rbg"),
    }
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(0, state, {}, wait=True)
        like = jax.tree.map(jax.numpy.zeros_like, {**state, "keys": 0, "unsafe": 0})
        like |= {name: jax.random.clone(state[name]) for name in ("keys", "unsafe")}
        like |= {"keys": jax.random.split(jax.random.key(4), 2)}
        found, _ = checkpoints.restore(like)
    assert (tmp_path / "checkpoints" / "0").exists() == (small < 0)
    for name, want in state.items():
        assert (found[name].dtype, found[name].sharding) == (want.dtype, want.sharding)
        numbers = want, found[name]
        if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
            numbers = map(jax.random.key_data, numbers)
        before, after = (np.asarray(x).tobytes() for x in numbers)
        assert before == after


def test_checkpoint_of_another_format_is_refused(tmp_path, monkeypatch):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        monkeypatch.setattr(checkpoints_module, "FORMAT", 6)
        checkpoints.save(0, {"w": jax.numpy.zeros(2)}, {}, wait=True)
        monkeypatch.undo()
        with pytest.raises(CheckpointError, match="format 6 .* version that started it"):
            checkpoints.newest_record()


def test_changed_bits_of_small_arrays_are_found(tmp_path):
    state = {"w": jax.numpy.zeros(2)}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(0, state, {}, wait=True)
    file = tmp_path / "checkpoints" / "0.json"
    file.write_text(file.read_text().replace("AAAAAAAAAAA=", "AAAAAAAAABA="))
    with (
        Checkpoints(tmp_path / "checkpoints") as checkpoints,
        pytest.raises(CheckpointError, match="It has changed"),
    ):
        checkpoints.restore(state)


def test_no_checkpoint_is_removed_before_two_newer_ones_are_on_the_disk(tmp_path, monkeypatch):
    """A failure of power may damage the newest checkpoint, which nobody has waited for."""
    folder, on_disk = tmp_path / "checkpoints", []
    write, save = checkpoints_module._write_through, ocp.CheckpointManager.save

    def written(paths):
        write(paths := list(paths))
        on_disk.append(paths[-2].name)  # before the folder of all checkpoints

    def saved(manager, step, **options):
        assert set(on_disk) >= {name for name in map(str, range(step - 2, step)) if int(name) >= 0}
        return save(manager, step, **options)

    monkeypatch.setattr(checkpoints_module, "_SMALL", -1)
    monkeypatch.setattr(checkpoints_module, "_write_through", written)
    monkeypatch.setattr(ocp.CheckpointManager, "save", saved)
    with Checkpoints(folder) as checkpoints:
        for step in range(6):
            checkpoints.save(step, {"w": jax.numpy.zeros(2)}, {})
        checkpoints.wait_until_saved()
        assert checkpoints.steps() == [5, 4, 3]
    assert on_disk == list("012345")


def _state_like():
    """Returns parameters and optimizer state of these runs before the first step."""
    task = CONFIG.task()
    return task.params, RunProgram(task).first_state(task.params)


def _assert_same(got, want):
    if jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    np.testing.assert_array_equal(got, want)


def test_run_continues_after_removing_damaged_checkpoint(stopped, undisturbed):
    _damage(stopped / "checkpoints" / "4.json")
    with pytest.raises(CheckpointError, match=r"/4\.json cannot be read .*continue from step 2\."):
        run(stopped)
    (stopped / "checkpoints" / "4.json").unlink()
    run(stopped)
    assert outcome(stopped) == outcome(undisturbed[1])


def test_checkpoint_of_another_model_is_not_called_damaged(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(0, {"w": jax.numpy.zeros(2)}, {}, wait=True)
        with pytest.raises(ConfigError, match="another model or method. Use another workdir"):
            checkpoints.restore({"w": jax.numpy.zeros(3)})


def test_never_restarts_without_checkpoints_of_earlier_run(stopped, capsys, tmp_path):
    for step in ("2", "4"):
        (stopped / "checkpoints" / f"{step}.json").unlink()
    _damage(stopped / "checkpoints" / "0.json")
    with pytest.raises(CheckpointError, match="account for both runs"):
        run(stopped)
    shutil.rmtree(stopped / "checkpoints")
    with pytest.raises(CheckpointError, match="without its checkpoints"):
        run(stopped)
    path = tmp_path / "config.py"
    path.write_text("from tests.runs import CONFIG\nget_configs = lambda: {'one': CONFIG.function}")
    assert main(["train", str(path), "--workdir", str(stopped)]) == 2
    assert "without its checkpoints" in capsys.readouterr().err


@pytest.mark.slow
def test_failed_write_reports_step_to_resume_from(tmp_path, undisturbed, monkeypatch):
    write = files.write_json

    def full(path, *args, **kwargs):
        if path.name == "4.json":
            raise OSError(28, "No space left on device")
        write(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_json", full)
        with pytest.raises(CheckpointError, match=r"No space left.*continues from step 2"):
            run(tmp_path)
    run(tmp_path)
    assert outcome(tmp_path) == outcome(undisturbed[1])


def test_partial_checkpoints_are_removed(tmp_path, monkeypatch):
    before = set(threading.enumerate())
    with Checkpoints(tmp_path / "fresh"):
        begun = [t.name for t in set(threading.enumerate()) - before]
        assert not any("_target_setting_result" in name for name in begun)
    left = tmp_path / "killed" / "2.orbax-checkpoint-tmp"
    file = tmp_path / "killed" / "2.json.partial"
    left.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr(checkpoints_module, "_SMALL", -1)
    with Checkpoints(tmp_path / "killed") as checkpoints:
        checkpoints.save(0, {"w": jax.numpy.zeros(2)}, {}, wait=True)
    assert not left.exists()
    assert not file.exists()


def test_shows_failures_but_no_advice_of_orbax():
    logger, file = logging.getLogger("absl"), ocp.__file__
    for path, level, text, shown in (
        (file, logging.WARNING, "text", False),
        (file, logging.ERROR, "text", True),
        (file, logging.ERROR, "Failed to json parse Metadata file: %s", False),
        (__file__, logging.WARNING, "text", True),
    ):
        record = logging.LogRecord("absl", level, path, 1, text, None, None)
        assert bool(logger.filter(record)) == shown


@pytest.mark.skipif(sys.platform == "win32", reason="Windows lacks POSIX file modes")
def test_checkpoint_folder_is_made_private_or_refused(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    folder.chmod(0o777)  # as after a copy without modes, or created by an attacker
    with Checkpoints(folder):
        assert folder.stat().st_mode & 0o077 == 0
    other = types.SimpleNamespace(st_uid=folder.stat().st_uid + 1)
    monkeypatch.setattr(cache_folder, "os", types.SimpleNamespace(fstat=lambda file: other))
    with pytest.raises(CheckpointError, match="must belong to the current user"):
        Checkpoints(folder)


def test_workdir_stays_locked_until_all_files_are_written(undisturbed, monkeypatch):
    """The workdir stays locked until all files are written, so summary and parameters match."""
    write, workdir = train_config.save_params, undisturbed[1]

    def meanwhile(*args):
        with pytest.raises(CheckpointError, match="in use by another process"):
            Checkpoints(workdir / "checkpoints")
        return write(*args)

    monkeypatch.setattr(train_config, "save_params", meanwhile)
    assert run(workdir)["steps"] == 6


@pytest.mark.slow
def test_refuses_two_processes_in_one_workdir(tmp_path):
    workdir = tmp_path / "run"
    hold = (
        "import sys; from pathlib import Path\n"
        "from dpoptax.training.run.checkpoints import Checkpoints\n"
        "with Checkpoints(Path(sys.argv[1])): print('held', flush=True), input()\n"
    )
    command = [sys.executable, "-c", hold, str(workdir / "checkpoints")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="run' is in use by another process"):
            run(workdir)
        assert [path.name for path in workdir.rglob("*")] == ["checkpoints"]
        other.kill()
    assert run(workdir)["steps"] == 6
