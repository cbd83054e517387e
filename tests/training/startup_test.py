"""Tests from the command to the first step: phases and the compilation cache."""

import dataclasses
import json
import os
import time

import jax
import numpy as np
import pytest

import dpoptax
from dpoptax import auditing, sampling
from dpoptax._pricing import accountants
from dpoptax.cli import compilation_cache
from dpoptax.training import loop, models
from dpoptax.training.cache_folder import cache_folder
from dpoptax.training.data.dataset import load_dataset
from dpoptax.training.run import evaluation, phases
from dpoptax.training.run.course import evaluated_steps
from dpoptax.training.run.phases import Phases
from dpoptax.training.run.privacy import make_plan
from tests.runs import CONFIG


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr("dpoptax.training.run.figures.plot_run", lambda *_: None)


class TestPhases:
    def test_does_not_count_inner_phases_twice(self):
        measured = Phases()
        begun = time.perf_counter()
        with measured("outer"):
            time.sleep(0.05)
            with measured("inner"):
                time.sleep(0.1)
        seconds, whole = measured.seconds(), time.perf_counter() - begun
        assert 0.05 <= seconds["outer"] < 0.1 <= seconds["inner"]
        assert sum(seconds.values()) == pytest.approx(whole, abs=0.01)

    def test_failed_phase_keeps_its_time(self):
        measured = Phases()

        def fail():
            with measured("failing"):
                time.sleep(0.02)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        with measured("next"):
            pass
        assert measured.seconds()["failing"] >= 0.02

    def test_reports_slow_phases_once(self, monkeypatch):
        monkeypatch.setattr(phases, "PATIENCE", 0.05)
        lines = []
        measured = Phases(lines.append)
        for _ in range(2):
            with measured("data"):
                time.sleep(0.2)
        with measured("accounting"):
            pass
        time.sleep(0.1)
        assert lines == ["loading data ..."]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 5000}, "^`batch_size` must be at most .* got 5000"),
        ({"model": "lineer", "sampling": "posson"}, "^`model`"),
        ({"model": "lineer", "optimizer": "sdg"}, "^`model`"),
        ({"sampling": "shuffled"}, "`sampling` must not be 'shuffled'"),
    ],
)
def test_errors_follow_the_order_of_the_run(tmp_path, changes, message):
    config = dataclasses.replace(CONFIG, **changes)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            loop.train_and_evaluate(config, tmp_path / "run", progress=False)


@pytest.mark.slow
def test_jitted_initialization_matches_eager():
    model = dataclasses.replace(CONFIG, model="cnn").build_model(10)
    inputs, key = np.ones((8, 8, 1), np.float32), jax.random.key(3)
    one = CONFIG.initial_variables(model, inputs, key)
    eager = models.init_variables(model, inputs, key)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(eager), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6)


class TestSummary:
    @pytest.mark.slow
    def test_phases_add_up_to_total_time(self, tmp_path):
        begun = time.perf_counter()
        loop.train_and_evaluate(CONFIG, tmp_path, progress=False)
        whole = time.perf_counter() - begun
        summary = json.loads((tmp_path / "summary.json").read_text())
        seconds = summary["phases"]
        assert {"data", "accounting", "init", "compile", "steps", "evaluation"} <= seconds.keys()
        assert {"checkpoints", "telemetry", "files"} <= seconds.keys()
        assert whole - 1 < sum(seconds.values()) <= whole
        assert 0 < summary["first_step_seconds"] < whole

    def test_shown_epsilon_is_never_below_spent_epsilon(self):
        given = {"noise_multiplier": 6.0, "steps": 12, "eval_every": 1, "accountant": "pld"}
        plan = make_plan(dataclasses.replace(CONFIG, **given), 1438)
        shown = plan.bounds(evaluated_steps(1, 12))
        assert list(shown) == list(range(13))
        assert all(shown[n] >= plan.epsilon(n) for n in (0, 1, 5, 11))
        assert shown[12] == plan.epsilon(12)

    @pytest.mark.slow
    def test_evaluations_need_no_accounting(self):
        config = dataclasses.replace(CONFIG, steps=12, eval_every=1)
        dataset = load_dataset("digits")
        plan = make_plan(config, dataset.train_size)
        plan.bounds(evaluated_steps(1, 12))
        before = accountants._priced.cache_info().misses
        history = loop.train(config, dataset, plan).history
        assert accountants._priced.cache_info().misses == before
        assert [entry["step"] for entry in history] == list(range(13))


class TestCompilationCache:
    @pytest.fixture(autouse=True)
    def no_folder_yet(self, monkeypatch):
        """Removes the tests' own cache folder from the environment."""
        before = jax.config.jax_compilation_cache_dir
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
        compilation_cache._set("jax_compilation_cache_dir", None)
        yield
        compilation_cache._set("jax_compilation_cache_dir", before)

    def test_cache_can_be_disabled(self, tmp_path):
        jax.config.update("jax_enable_compilation_cache", False)
        try:
            with compilation_cache.kept_in(tmp_path / "kept"):
                assert not (tmp_path / "kept").exists()
        finally:
            jax.config.update("jax_enable_compilation_cache", True)

    @pytest.mark.slow
    def test_default_is_in_cache_folder_of_user(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_folder("compiled") == tmp_path / "dpoptax" / "compiled"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert cache_folder("compiled").is_absolute()

    def test_restores_settings(self, tmp_path):
        before = {name: getattr(jax.config, name) for name in compilation_cache._SETTINGS}
        environment = dict(os.environ)
        with compilation_cache.kept_in(tmp_path):
            assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path))
            assert os.environ["JAX_COMPILATION_CACHE_DIR"].startswith(str(tmp_path))
        assert {name: getattr(jax.config, name) for name in compilation_cache._SETTINGS} == before
        assert dict(os.environ) == environment

    @pytest.mark.parametrize(
        "attack", ["many runs", pytest.param("one run", marks=pytest.mark.slow)]
    )
    def test_programs_of_audits_contain_no_data_or_keys(self, attack, tmp_path):
        """Data and keys are arguments, not constants, so other runs share the same programs."""
        clip, sampler = dpoptax.l2_clip(1.0), sampling.PoissonSampler(64, 64, seed=0)
        grad_fn = dpoptax.clipped_grad(auditing.linear_loss, clip)

        def kept(seed):
            key = jax.random.key(seed)
            tx = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=64, key=key)
            data = jax.random.normal(key, (64, 3))
            game = auditing.Game(tx, grad_fn, jax.numpy.zeros(3), data, sampler)
            if attack == "many runs":
                auditing.audit(game, key=jax.random.key(1), trials=64, claimed_epsilon=1.0)
            else:
                for threat_model in ("white-box", "last-iterate"):
                    auditing.audit_one_run(
                        game,
                        key=jax.random.key(1),
                        threat_model=threat_model,
                        claimed_epsilon=1.0,
                    )
            (inside,) = tmp_path.iterdir()
            return {file.name for file in inside.glob("*-cache")}

        with compilation_cache.kept_in(tmp_path):
            first = kept(0)
            assert first
            assert kept(1) == first

    def test_keeps_folder_configured_in_jax(self, tmp_path):
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
        try:
            with compilation_cache.kept_in(tmp_path / "ours"):
                assert jax.config.jax_compilation_cache_dir == str(tmp_path / "theirs")
        finally:
            jax.config.update("jax_compilation_cache_dir", None)
        assert not (tmp_path / "ours").exists()

    def test_warns_if_folder_is_a_file(self, tmp_path):
        (tmp_path / "file").write_text("")
        with (
            pytest.warns(
                UserWarning, match="Compiled programs are not .*JAX_COMPILATION_CACHE_DIR"
            ),
            compilation_cache.kept_in(tmp_path / "file"),
        ):
            assert jax.config.jax_compilation_cache_dir is None

    def test_does_not_use_folder_writable_by_others(self, tmp_path):
        inside = tmp_path / compilation_cache._machine()
        inside.mkdir()
        inside.chmod(0o777)
        with (
            pytest.warns(UserWarning, match="must not be writable by other users"),
            compilation_cache.kept_in(tmp_path),
        ):
            assert jax.config.jax_compilation_cache_dir is None

    def test_does_not_use_folder_replaceable_by_others(self, tmp_path):
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        with (
            pytest.warns(UserWarning, match="must not be writable by other users"),
            compilation_cache.kept_in(shared / "dpoptax" / "compiled"),
        ):
            assert jax.config.jax_compilation_cache_dir is None
        shared.chmod(0o1777)  # like /tmp: users can replace only their own files
        with compilation_cache.kept_in(shared / "dpoptax" / "compiled"):
            assert jax.config.jax_compilation_cache_dir is not None

    def test_removes_oldest_files_if_too_large(self, tmp_path, monkeypatch):
        monkeypatch.setattr(compilation_cache, "LARGEST", 10)
        for index in range(3):
            file = tmp_path / f"{index}-cache"
            file.write_bytes(b"x" * 6)
            os.utime(file, (index, index))
        compilation_cache._prepared(tmp_path)
        assert [file.name for file in tmp_path.glob("*-cache")] == ["2-cache"]


def test_evaluation_compiles_once_per_shape():
    model = CONFIG.build_model(3)
    inputs = np.arange(20, dtype=np.float32).reshape(5, 4) / 20
    split = {"inputs": inputs, "labels": np.array([0, 1, 2, 0, 1])}
    params, frozen = CONFIG.initial_variables(model, inputs[0], jax.random.key(0))
    evaluate = evaluation.Evaluator(CONFIG, model, {"test": split, "train": split}, frozen)
    first = evaluate(params, "test")
    moved = jax.tree.map(lambda leaf: 2.0 * leaf, params)
    assert evaluate(moved, "test") != evaluate(params, "test") == first
    evaluate(params, "train")
    chunk = min(1024, CONFIG.microbatch_size or 1024)
    assert evaluation.evaluate_split(model, chunk)._cache_size() == 1
