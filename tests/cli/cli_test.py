"""Tests of the command line, run in this process with the arguments of a user."""

import dataclasses
import importlib.metadata
import json
from pathlib import Path

import jax
import matplotlib.image
import pytest

import dpoptax
from dpoptax.training import Comparison, ConfigError, compare, config_of, load_config, load_configs
from dpoptax.training.cli import compilation_cache
from dpoptax.training.cli.main import main
from dpoptax.training.search import trials
from experiments.config import ExperimentConfig
from experiments.methods import NonPrivate

DIGITS = Path(__file__).parents[2] / "configs" / "digits"
TINY = ("--steps", "4", "--batch-size", "64")
CONFIG = """
from dpoptax.training import Task
from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Doppler, NonPrivate

RUN = ExperimentConfig(
    method={method},
    model="linear",
    steps=4,
    eval_every=2,
    batch_size=64,
    accountant="rdp"{more},
)

def {name}(run: ExperimentConfig = RUN) -> Task:
    return run.task()
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes config files of short runs that draw no figure."""
    monkeypatch.setattr("dpoptax.training.run.figures.plot_run", lambda *_: None)

    def write(name="dp_sgd", method="DPSGD()", more=""):
        path = tmp_path / f"{name}.py"
        path.write_text(CONFIG.format(name=name, method=method, more=more))
        return str(path)

    return write


def error_of(capsys, *arguments):
    """Returns the message of a command that must exit with code 2 and without a traceback."""
    assert main(arguments) == 2
    # On a slow machine, a line of progress comes first.
    text = capsys.readouterr().err
    _, start, message = text.rpartition("dpoptax: error: ")
    assert start
    assert "Traceback" not in text
    return message


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in DIGITS.glob("*.py")))
def test_every_digits_config_trains(name, tmp_path, capsys, monkeypatch):
    path = DIGITS / f"{name}.py"
    files, model = ["metrics.jsonl", "params.msgpack"], ()
    if name == "dp_sgd":
        files.append("training.png")
    else:
        monkeypatch.setattr("dpoptax.training.run.figures.plot_run", lambda *_: None)
        model = ("--model", "linear")
    assert main(["train", str(path), *TINY, *model, "--workdir", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["config"]["steps"] == summary["steps"] == 4
    assert "test accuracy" in capsys.readouterr().out
    assert all((tmp_path / name).stat().st_size > 0 for name in files)


@pytest.mark.slow
def test_options_accept_dashes_and_underscores(config, tmp_path):
    path = str(DIGITS / "doppler.py")
    options = ["--learning_rate", "0.25", "--l2-clip-norm", "0.5", "--preset", "momentum", *TINY]
    assert main(["train", path, *options, "--workdir", str(tmp_path / "run")]) == 0
    written = json.loads((tmp_path / "run" / "summary.json").read_text())["config"]
    assert (written["learning_rate"], written["l2_clip_norm"]) == (0.25, 0.5)
    assert written["preset"] == "momentum"


def test_runs_draw_a_seed_and_warn_about_a_given_one(config, tmp_path, capsys):
    hashes = []
    for name in ("first", "second"):
        assert main(["train", config(), "--workdir", str(tmp_path / name)]) == 0
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        hashes.append(summary["params_sha256"])
        assert "seed" not in summary["config"]
        assert summary["assumed_secret"] == []
        told = capsys.readouterr()
        assert "1e-05)-differentially private; written to " in told.out
        assert "seed" not in told.err
    assert hashes[0] != hashes[1]
    # The same command resumes with the seed that the first start drew.
    assert main(["train", config(), "--workdir", str(tmp_path / "first")]) == 0
    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert summary["params_sha256"] == hashes[0]
    capsys.readouterr()
    given = ["--seed", "123456", "--workdir", str(tmp_path / "given")]
    assert main(["train", config(), *given]) == 0
    told = capsys.readouterr()
    assert told.err.count("dpoptax: warning: `seed` can be read in the config") == 1
    assert "123456" not in told.out + told.err
    assert "private if the seed stays secret and no other run uses it" in told.out
    plain = ["--seed", "3", "--workdir", str(tmp_path / "plain")]
    assert main(["train", config("plain", "NonPrivate()"), *plain]) == 0
    assert "`seed`" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--learning-rat", "--preset", "--privacy"])
def test_rejects_unknown_option(config, tmp_path, capsys, option):
    with pytest.raises(SystemExit) as exit_info:
        main(["train", config(), option, "1", "--workdir", str(tmp_path / "run")])
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert option in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "100000"], "`batch_size` must be at most 1438"),
        (["--epsilon", "nan"], "got nan"),
        (["--epsilon", "None"], "Pass `epsilon` or `noise_multiplier`, got neither."),
        (["--noise-multiplier", "-1"], "`noise_multiplier` must be"),
        (["--l2-clip-norm", "1e300"], "`l2_clip_norm` must be a number in (0, 1e9], got 1e+300"),
        (["--delta", "0"], "`delta` must be"),
        (["--seed", "-1"], "`seed` must be from 0 to 2**256 - 1"),
        (["--dataset", "digit"], "got 'digit'. Did you mean 'digits'?"),
        (["--model", "transfomer"], "got 'transfomer'"),
        (["--optimizer", "adm"], "`optimizer` must be one of adam, "),
        (["--sampling", "shuffled"], "Use sampling='poisson'"),
    ],
)
def test_bad_value_gives_one_clear_message(config, tmp_path, capsys, options, message):
    workdir = tmp_path / "run"
    assert message in error_of(capsys, "train", config(), *options, "--workdir", str(workdir))
    assert not (workdir / "summary.json").exists()


NUMBERS = ["--dataset-size", "5000", "--batch-size", "100", "--delta", "1e-5"]


def test_plan_prices_a_run_by_its_numbers(capsys):
    assert main(["plan", *NUMBERS, "--epochs", "4", "--epsilon", "2"]) == 0
    shown = capsys.readouterr().out
    plan = dpoptax.PrivacyPlan(
        dataset_size=5000, batch_size=100, steps=200, epsilon=2.0, delta=1e-5
    )
    assert shown.startswith(f"{plan}\n  attacks  true-positive rate at most ")
    sigma = ["--noise-multiplier", str(plan.noise_multiplier)]
    assert main(["plan", *NUMBERS, "--steps", "200", *sigma]) == 0
    assert capsys.readouterr().out == shown
    bins = ["--epochs", "4", "--epsilon", "2", "--sampling", "balls_in_bins"]
    assert main(["plan", *NUMBERS, *bins]) == 0
    assert "drawn by RandomAllocationSampler" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epsilon", "2"], "Exactly one of --epochs and --steps must be given."),
        (["--epochs", "4"], "Pass `epsilon` or `noise_multiplier`, got neither."),
        (["--epochs", "nan", "--epsilon", "2"], "`epochs` must be positive and finite, got nan."),
        (["--steps", "4", "--epsilon", "2", "--batch-size", "0"], "`batch_size` must be a"),
        (["--steps", "0", "--epsilon", "2"], "`steps` must be"),
    ],
)
def test_plan_by_numbers_names_what_is_missing(capsys, options, message):
    assert message in error_of(capsys, "plan", *NUMBERS, *options)


def test_unknown_preset_lists_known_presets(tmp_path, capsys):
    path = str(DIGITS / "doppler.py")
    message = error_of(capsys, "train", path, "--preset", "low", "--workdir", str(tmp_path / "run"))
    assert "'low'" in message
    assert "doppler-first-order-1" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def run(:", "SyntaxError"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("x = 1", "must define a function that returns a Task, got none"),
        ("def get_configs(): return {}", "must define a function that returns a Task"),
        ("from dpoptax.training import Task\ndef run(a) -> Task: ...", "a type and a default"),
        ("from dpoptax.training import Task\ndef run() -> Task: ...", "must return a Task, got"),
        ("def get_configs():\n    return 1 / 0", "line 2: ZeroDivisionError"),
        (CONFIG.format(name="run", method="DPSGD()", more=", step=3"), "argument 'step'"),
    ],
)
def test_broken_config_file_gives_one_clear_message(tmp_path, capsys, text, message):
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert message in error_of(capsys, "train", str(path), "--workdir", str(tmp_path / "run"))


def test_wrong_path_gives_one_clear_message(config, tmp_path, capsys):
    assert "must be a Python file" in error_of(capsys, "train", "missing.py", "--workdir", "x")
    assert "Put options after the path." in error_of(capsys, "train", "--workdir", "x", config())
    occupied = tmp_path / "occupied"
    occupied.write_text("")
    assert "occupied" in error_of(capsys, "train", config(), "--workdir", str(occupied))


def test_warns_once_about_large_delta(config, tmp_path, capsys):
    options = ["--delta", "0.01", "--noise-multiplier", "1", "--epsilon", "None"]
    assert main(["train", config(), *options, "--workdir", str(tmp_path / "run")]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "1/N" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("dpoptax: warning: delta=0.01 is not below 1/N")


def test_reports_run_stopped_by_budget(config, tmp_path, capsys):
    options = ["--noise-multiplier", "1", "--epsilon", "1.7"]
    assert main(["train", config(), *options, "--workdir", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    assert "of 4 would exceed ε = 1.7" in shown.out


def test_help_version_and_unknown_commands(config, capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dpoptax {dpoptax.__version__}\n"
    for arguments, code in ((["--help"], 0), ([], 2), (["train", "--help"], 0), (["train"], 2)):
        assert main(arguments) == code
        shown = capsys.readouterr()
        assert "train CONFIG --workdir DIR" in shown.out
        assert ("needs a config" in shown.err) == (arguments == ["train"])
    for arguments in (["--help"], ["train", "--help"], ["audit", "--help"]):
        main(arguments)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith(f"usage: dpoptax {(*arguments[:-1], 'COMMAND')[0]} ")
    for arguments in (["train", config(), "--help"], ["compare", "--help"]):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 0
    output = capsys.readouterr().out
    assert "--l2-clip-norm" in output
    assert "--factors" in output
    assert "`command` must be one of audit, compare, configs, plan" in error_of(capsys, "tarin")


def test_console_script_is_installed():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="dpoptax")
    assert script.load() is main


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("compare")
    paths = {}
    for name, method in (("dp_sgd", "DPSGD()"), ("plain", "NonPrivate()")):
        paths[name] = workdir / f"{name}.py"
        paths[name].write_text(CONFIG.format(name=name, method=method, more=""))
    configs = {name: load_config(path) for name, path in paths.items()}
    comparison = Comparison(
        workdir=workdir / "out",
        seeds=2,
        epsilon=4.0,
        factors=(1e-3, 1.0),
        set=("learning_rate=1", "l2_clip_norm=0.5", "optimizer=momentum"),
    )
    return paths, workdir / "out", compare(configs, comparison, progress=False)


@pytest.mark.slow
def test_comparison_table_has_every_method_at_one_epsilon(compared):
    _, workdir, results = compared
    assert json.loads((workdir / "results.json").read_text())["methods"][0]["name"] == "DP-SGD"
    private, plain = results.methods
    assert 3.9 < private.epsilon <= 4.0
    assert plain.epsilon is None
    rows = (workdir / "table.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in (rows[0], rows[2], rows[3])] == [
        "method",
        "DP-SGD",
        "Non-private",
    ]
    assert "∞ (not private)" in rows[3]
    assert private.runs[0]["config"]["l2_clip_norm"] == 0.5
    assert {m.runs[0]["config"]["optimizer"] for m in results.methods} == {"momentum"}
    assert "covers neither the runs that selected" in (workdir / "table.md").read_text()


@pytest.mark.slow
def test_learning_rate_is_selected_by_validation_accuracy(compared):
    for method in compared[2].methods:
        means = {point.learning_rate: sum(point.validation_scores) / 2 for point in method.grid}
        assert means[1.0] > means[1e-3]
        assert method.learning_rate == 1.0
        assert any(method.name in note and "edge" in note for note in compared[2].notes)


@pytest.mark.slow
def test_comparison_resumes_and_trains_only_new_runs(tmp_path, monkeypatch):
    configs = {
        rate: config_of(
            ExperimentConfig(method=NonPrivate(), model="linear", steps=2, batch_size=64),
            learning_rate=rate,
        )
        for rate in (1.0, 0.3, 0.07)  # no two share a multiple by 2, so no two share a run
    }
    comparison = Comparison(workdir=tmp_path, seeds=1)
    trained, run = [], trials._run

    def train(trial, *args, **options):
        if len(trained) == stop_after:
            raise KeyboardInterrupt
        trained.append(trial.config.flags["learning_rate"].default)
        return run(trial, *args, **options)

    monkeypatch.setattr(trials, "_run", train)

    def compared(*rates):
        trained.clear()
        found = compare({str(rate): configs[rate] for rate in rates}, comparison, progress=False)
        assert json.loads((tmp_path / "results.json").read_text()) == dataclasses.asdict(found)
        return [method.name for method in found.methods]

    stop_after = 8  # a method takes five rates and a final run
    with pytest.raises(KeyboardInterrupt):
        compared(1.0, 0.3)
    stop_after = None
    assert compared(1.0, 0.3) == ["Non-private (1.0)", "Non-private (0.3)"]
    assert len(trained) == 4  # eight of twelve were finished
    assert compared(0.07, 1.0) == ["Non-private (0.07)", "Non-private (1.0)"]
    assert len(trained) == 6
    comparison = Comparison(workdir=tmp_path, seeds=1, steps=3, factors=(2.0, 1.0))
    assert compared(0.3) == ["Non-private"]
    assert trained[:2] == [0.3, 0.6]
    assert len(trained) == 3
    assert compared(0.3) == ["Non-private"]
    assert not trained
    monkeypatch.setattr("dpoptax.training.run.files.source_sha256", lambda: "of other code")
    assert compared(0.3) == ["Non-private"]
    assert len(trained) == 3


@pytest.mark.slow
def test_comparison_figure_is_not_blank(compared):
    image = matplotlib.image.imread(compared[1] / "comparison.png")
    assert (compared[1] / "comparison.pdf").read_bytes().startswith(b"%PDF")
    assert image.shape[1] > 1000
    assert image.std() > 0.05


@pytest.mark.slow
def test_command_compares_with_default_grid(config, tmp_path, capsys):
    paths = [config("plain", "NonPrivate()"), config("other", "NonPrivate()")]
    options = ["--seeds", "1", "--steps", "2", "--set", "batch_size=32", "model=mlp"]
    options += ["--workdir", str(tmp_path / "out")]
    assert main(["compare", *paths, *options]) == 0
    output = capsys.readouterr().out
    for name in ("Non-private (plain)", "Non-private (other)", "comparison.png"):
        assert name in output
    methods = json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    assert [point["learning_rate"] for point in methods[0]["grid"]] == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert methods[0]["test_score_std"] is None
    settings = [method["runs"][0]["config"] for method in methods]
    assert {(given["batch_size"], given["model"]) for given in settings} == {(32, "mlp")}
    assert "∞ (not private)" in output


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        (", epsilon=2.0", [], "got dp_sgd: 3.0, other: 2.0. Pass --epsilon."),
        (", delta=1e-6", [], "`delta` must be the same for all configs"),
        ("", ["--seeds", "0"], "`seeds` must be at least 1, got 0."),
        ("", ["--factors", "1", "0"], "`factors` must be positive and finite, got (1.0, 0.0)."),
        ("", ["--epsilon", "-2"], "`epsilon` must be"),
    ],
)
def test_incomparable_configs_give_one_clear_message(
    config, tmp_path, capsys, more, options, message
):
    paths = [config("dp_sgd"), config("other", "Doppler()", more)]
    workdir = str(tmp_path / "out")
    assert message in error_of(capsys, "compare", *paths, *options, "--workdir", workdir)


def test_refuses_config_given_twice(config, tmp_path, capsys):
    paths = [config("dp_sgd"), config("dp_sgd")]
    assert "must name each config once" in error_of(
        capsys, "compare", *paths, "--workdir", str(tmp_path / "out")
    )


@pytest.fixture
def no_cache_yet(tmp_path, monkeypatch):
    """Removes the tests' own cache, and makes `tmp_path` the user's folder of caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")  # restored afterwards
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "dpoptax" / "compiled"
    jax.config.update("jax_compilation_cache_dir", before)


def test_compiled_programs_are_kept_in_private_folder(no_cache_yet, monkeypatch):
    compilation_cache.keep_programs()
    (folder,) = no_cache_yet.iterdir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    compilation_cache.keep_programs()  # JAX has a cache already
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_folder_that_others_may_write_to_keeps_no_programs(no_cache_yet):
    inside = no_cache_yet / compilation_cache._machine()
    inside.mkdir(parents=True)
    inside.chmod(0o777)
    with pytest.warns(UserWarning, match="must not be writable by other users"):
        compilation_cache.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None


def test_installed_names_are_configs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # not in the repository
    assert main(["configs"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["digits", *(f"digits/{path.stem}" for path in sorted(DIGITS.glob("*.py")))]
    assert load_config("digits").digest == load_config(DIGITS / "dp_sgd.py").digest
    assert load_config("digits/disk").digest == load_config(DIGITS / "disk.py").digest
    standard = {"dp_sgd", "momentum", "disk", "pmlf", "adaptive_kalman", "non_private"}
    assert set(load_configs("digits")) == standard
    (tmp_path / "digits").write_text(CONFIG.format(name="own", method="DPSGD()", more=""))
    assert load_config("digits").name == "own"  # a file comes first
    for name in ("digits/none", "other", "../configs/digits/disk"):
        with pytest.raises(ConfigError, match="a name that `dpoptax configs` lists"):
            load_configs(name)
