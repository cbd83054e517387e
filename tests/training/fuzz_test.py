"""Tests of hostile input to commands, configs and checkpoints: errors without tracebacks."""

import contextlib
import io
from pathlib import Path

import jax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpoptax.training import load_config, train_config
from dpoptax.training.cli.main import main
from dpoptax.training.run import seeds
from dpoptax.training.run.program import RunProgram

DIGITS = Path(__file__).parents[2] / "configs" / "digits"
GEODP = DIGITS.parent / "papers" / "geodp" / "figure_5.py"
NAMES = list(load_config(DIGITS / "dp_sgd.py").flags)
numbers = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(repr),
    st.sampled_from(["0", "-0.0", "1e400", "nan", "inf", "-inf", "1_000", "0x10", "1/3", "٣"]),
)
words = st.one_of(
    numbers,
    st.text(max_size=8).filter(lambda text: not text.startswith("-")),
    st.sampled_from(["None", "True", "", " ", "poisson", "mlp", "a" * 300, "../..", "\x00"]),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]
hostile = settings(max_examples=60, deadline=None, derandomize=True)


class _PlannedError(Exception):
    """A run reached its first step."""


def _plan(config, workdir, **options):
    """Runs everything before the first step."""
    task = config.task()
    if (seed := train_config.seed_of(config)) is not None:
        seeds.key_of(seed, "threefry")
    program = RunProgram(task)
    jax.eval_shape(program.chain().init, task.params)
    raise _PlannedError


def _run(*arguments):
    """Returns the exit code, or None if it would train. Raises errors that users would see."""
    error = io.StringIO()
    with (
        contextlib.redirect_stderr(error),
        contextlib.redirect_stdout(io.StringIO()),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(train_config, "train_and_evaluate", _plan)
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
        except _PlannedError:
            return None
    assert "Traceback" not in error.getvalue()
    assert code in (0, 2), (arguments, code)
    if code == 2:
        assert error.getvalue().strip() or arguments[-1:] != ("--help",)
    return code


@hostile
@given(field=st.sampled_from(NAMES), value=words)
@example(field="batch_size", value="9" * 30)
@example(field="epsilon", value="1e-300")
@example(field="l2_clip_norm", value="1e-300")
@example(field="learning_rate", value="1e308")
@example(field="steps", value="9" * 20)
@example(field="seed", value="9" * 50)
def test_any_value_of_any_field(field, value):
    option = f"--{field.replace('_', '-')}"
    _run("train", str(DIGITS / "dp_sgd.py"), option, value, "--workdir", "w")


@hostile
@given(
    method=st.sampled_from(["disk", "doppler", "pmlf", "inner_outer", "adaptive_kalman"]),
    data=st.data(),
)
def test_any_parameter_of_any_method(method, data):
    path = DIGITS / f"{method}.py"
    names = [name for name in load_config(path).flags if name not in NAMES]
    name, value = data.draw(st.sampled_from(names)), data.draw(words)
    option = f"--{name.replace('_', '-')}"
    _run("train", str(path), option, value, "--workdir", "w")


@hostile
@given(st.lists(st.one_of(words, st.text(max_size=6), st.sampled_from(["train", "--help"]))))
def test_any_command(arguments):
    _run(*arguments)


@hostile
@given(text=st.one_of(st.text(), st.binary(), st.sampled_from(["def get_configs(): 1/0"])))
def test_any_config_file(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "config.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
    assert _run("train", str(path), "--workdir", "w") == 2
    assert _run("compare", str(path), "--workdir", "w") == 2
    assert _run("audit", str(path)) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("audit",),
        ("audit", "--trials", "5"),
        ("audit", "missing.py"),
        ("audit", str(DIGITS / "non_private.py")),
        ("audit", str(DIGITS / "dp_sgd.py"), "--trials", "many"),
        ("audit", str(DIGITS / "dp_sgd.py"), "--confidence", "2"),
        ("audit", str(DIGITS / "dp_sgd.py"), "--trials", "-1"),
        ("audit", f"{GEODP}:a/sigma-1/geodp_1-2048"),
        ("train", str(DIGITS / "pmlf.py"), "--length", "300000"),
    ],
)
def test_bad_commands(arguments):
    assert _run(*arguments) == 2
