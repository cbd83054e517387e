"""Tests of the installed package: its import, its types and its names."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
import textwrap
import types

import pytest

import dpoptax

SUBMODULES = (
    "accounting",
    "contrib",
    "extend",
    "tables",
    "users",
)
PACKAGES = (
    "dpoptax", "dpoptax.accounting", "dpoptax.filters", "dpoptax.sampling",
)  # fmt: skip
# Each takes longer to import than the package, or is an optional dependency.
FIRST_WHEN_NEEDED = {
    *("chex", "dp_accounting", "flax", "jax_privacy", "matplotlib", "orbax", "pandas", "scipy"),
    *("PIL", "pooch", "safetensors", "sklearn", "tokenizers", "tqdm", "tyro"),
}

USER_PROGRAM = """\
import dpoptax
import jax
import jax.numpy as jnp
import optax
from dpoptax import accounting
from dpoptax.sampling import PoissonSampler, Sampler


def loss_fn(params: dict[str, jax.Array], example: jax.Array) -> jax.Array:
    return jnp.sum((params["w"] - example) ** 2)


sampler: Sampler = PoissonSampler(dataset_size=100, batch_size=10, seed=0)
sigma: float = accounting.calibrate(epsilon=3.0, delta=1e-4, steps=10, sampler=sampler)
tx: optax.GradientTransformation = optax.chain(
    dpoptax.gaussian_noise(noise_multiplier=sigma, batch_size=10, key=jax.random.key(0)),
    dpoptax.doppler(b=dpoptax.filters.preset("momentum").b, a=(-0.9,)),
    optax.sgd(0.1),
)
clip: dpoptax.Clip = dpoptax.l2_clip(1.0)
grad_fn = dpoptax.clipped_grad(loss_fn, clip, microbatch_size=5)
state = tx.init({"w": jnp.zeros(3)})
spent: float = dpoptax.accounting.guarantee(state, sampler, accountant="rdp").epsilon(1e-4)
"""
MISTAKES = {
    "dpoptax.l2_clip('one')": "arg-type",
    "dpoptax.accounting.planned_guarantee(noise_multiplier=1.0, delta=1e-5)": "call-arg",
    "dpoptax.accounting.guarantee(None, 0)": "arg-type",
    "dpoptax.no_such_name": "attr-defined",
    "dpoptax.matrix.no_such_name": "attr-defined",
}


def run(program, *arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
    )


def test_import_loads_little_besides_jax_and_optax():
    program = """
        import sys, json, jax, optax
        before = set(sys.modules)
        import dpoptax
        print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))
    """
    done = run(program)
    assert done.returncode == 0, done.stderr
    before, added = map(set, json.loads(done.stdout))
    assert not {name.split(".")[0] for name in before | added} & FIRST_WHEN_NEEDED
    # Most of the modules belong to jax and optax; only a few others remain.
    others = {name for name in added if name.split(".")[0] not in ("dpoptax", "jax", "numpy")}
    assert not others, sorted(others)
    assert not any(f"dpoptax.{name}" in added for name in (*SUBMODULES, "training"))


@pytest.mark.slow
def test_submodules_are_imported_lazily():
    program = f"""
        import sys, dpoptax
        names = {SUBMODULES}
        assert set(names) <= set(dir(dpoptax)), dir(dpoptax)
        assert not any(f"dpoptax.{{name}}" in sys.modules for name in names)
        for name in names:
            module = getattr(dpoptax, name)
            assert module is sys.modules[f"dpoptax.{{name}}"] is getattr(dpoptax, name)
        from dpoptax import {", ".join(SUBMODULES)}
    """
    done = run(program)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "most"),
    [
        # Limits on the number of modules besides the package's own, slightly above the actual
        # counts.
        ("import dpoptax.sampling, dpoptax.users, dpoptax.matrix, dpoptax.filters.spectrum", 5),
        ("from dpoptax.training.cli.main import main; main(['--help'])", 5),
        ("from dpoptax.training.cli.main import main; main(['train', '--help'])", 5),
    ],
)
def test_light_imports_load_neither_accounting_nor_models(program, most):
    whole = f"""
        import sys, json, dpoptax, jax, optax
        dpoptax.clipped_grad, dpoptax.gaussian_noise, dpoptax.disk
        before = set(sys.modules)
        {program}
        print(json.dumps(sorted(set(sys.modules) - before)))
    """
    done = run(whole)
    assert done.returncode == 0, done.stderr
    added = json.loads(done.stdout.splitlines()[-1])
    assert not {name.split(".")[0] for name in added} & FIRST_WHEN_NEEDED
    assert len([name for name in added if not name.startswith("dpoptax")]) < most


@pytest.mark.slow
def test_fit_without_a_folder_imports_no_checkpoints():
    pytest.importorskip("tqdm", reason="the extra `train` is not installed")
    done = run(
        """
        import sys, dpoptax, jax.numpy as jnp, optax
        from dpoptax.training import fit
        run = {"dataset_size": 20, "batch_size": 5, "steps": 2, "noise_multiplier": 9.0}
        plan = dpoptax.PrivacyPlan(**run, accountant="rdp")
        loss = lambda x, example: (x - example) ** 2
        fit(loss, jnp.zeros(()), jnp.ones(20), plan, optimizer=optax.sgd(0.1), progress=False)
        print(sorted({name.split(".")[0] for name in sys.modules} & {"orbax", "tyro"}))
        """
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_help_does_not_import_accounting(command):
    done = run(
        f"""
        import sys
        from dpoptax.training.cli.main import main
        try:
            main(["{command}", "--help"])
        except SystemExit:
            print("dp_accounting" in sys.modules)
        """
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_top_level_has_at_most_thirty_names():
    names = {name for name in dir(dpoptax) if not name.startswith("_")}
    modules = {name for name, home in handed_on(dpoptax).items() if home == "dpoptax"}
    assert 20 < len(names - modules) <= 30


def handed_on(module):
    """Returns the names that a package shows to type checkers, with the modules they are from."""
    return {
        alias.name: node.module
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpoptax")
        for alias in node.names
        if alias.asname == alias.name
    }


@pytest.mark.parametrize("name", PACKAGES)
def test_lazy_names_are_those_of_type_checkers(name):
    module = importlib.import_module(name)
    names = handed_on(module)
    assert names.keys() <= set(dir(module))
    for public, home in names.items():
        if home == name:
            continue  # a module, which may need an extra
        value = getattr(module, public)
        if not isinstance(value, types.ModuleType):
            assert value is getattr(importlib.import_module(home), public)


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'$"):
        dpoptax.no_such_name  # noqa: B018
    assert not hasattr(dpoptax, "torch")
    with pytest.raises(AttributeError, match=r"It is dpoptax\.contrib\.geodp$"):
        dpoptax.geodp  # noqa: B018
    with pytest.raises(AttributeError, match=r"It is dpoptax\.extend\.trust_clipped$"):
        dpoptax.trust_clipped  # noqa: B018


@pytest.mark.slow
def test_missing_extra_is_reported():
    uses = {
        "import dpoptax.auditing": "`dpoptax.auditing` needs jax_privacy",
        "dpoptax.matrix.optimal_banded_toeplitz(10, bands=2)": "pip install 'dpoptax[matrix]'",
        "from dpoptax.training.cli.main import main; main(['plan', 'x.py'])": "line needs tyro",
        "from dpoptax.training import fit": "`dpoptax.training.fit` needs tqdm",
        "import dpoptax.integrations.tunix": "`dpoptax.integrations.tunix` needs etils",
        "import dpoptax.integrations.kauldron": "`dpoptax.integrations.kauldron` needs ",
    }
    program = """
        import json, sys
        for missing in ("tyro", "jax_privacy", "matplotlib", "tqdm", "etils"):
            sys.modules[missing] = None
        import dpoptax
        for use in json.loads(sys.argv[1]):
            try:
                exec(use)
            except (ImportError, SystemExit) as error:
                print(error)
    """
    done = run(program, json.dumps(list(uses)))
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == len(uses)
    for line, part in zip(said, uses.values(), strict=True):
        assert part in line
        assert "install" in line
        assert "dpoptax[" in line


@pytest.mark.slow
def test_type_checker_accepts_program_and_finds_mistakes(tmp_path):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(USER_PROGRAM)
    bad.write_text("\n".join(["import dpoptax", *MISTAKES, ""]))
    options = ["[mypy]", "strict = True", "[mypy-optax.*]", "ignore_missing_imports = True", ""]
    (tmp_path / "mypy.ini").write_text("\n".join(options))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", "cache"]
        + ["--hide-error-context", "good.py", "bad.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    found = [line for line in done.stdout.splitlines() if "error:" in line]
    expected = {f"bad.py:{i}": code for i, code in enumerate(MISTAKES.values(), start=2)}
    assert {line.split(": ")[0]: line.split("[")[-1][:-1] for line in found} == expected, (
        done.stdout + done.stderr
    )
