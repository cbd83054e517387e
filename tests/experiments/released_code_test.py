"""Tests of the transcriptions of the papers' released code: noise, sensitivity, and attacks."""

import functools
import math

import numpy as np
import pytest

from dpoptax import accounting, auditing
from experiments.command_line import main
from experiments.released import decomposition, linear_model, noise, rules, tables
from experiments.released.geodp_digits import dp_branch, geodp_branch
from experiments.released.problems import PROBLEMS, Composed, Halved
from tests.oracles import disk as disk_oracle
from tests.oracles import pmlf as pmlf_oracle

FILTER = functools.partial(rules.LowPass, (0.15, -0.05), (-0.9,))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_released_pmlf_has_noise_of_one_of_k_gradients(k):
    measured = noise.measure(rules.released_pmlf(k))
    assert measured.multiplier == pytest.approx(1 / k, rel=0.01)
    assert measured.first == pytest.approx(1 / k, rel=0.05)
    assert (measured.same, k == 1 or measured.opposite) == (k, k == 1 or k - 2)


@pytest.mark.parametrize(
    ("kappa", "gamma"), [(0.7, 0.5), (0.5, 0.7), (0.7, 0.1), (0.9, 0.5), (0.99, 0.2), (0.6, 3.0)]
)
def test_released_disk_has_less_noise_than_calibrated(kappa, gamma):
    c = (1 - kappa) / (kappa * gamma)
    formula = abs(1 - c) / (math.hypot(c, 1 - c) * (abs(c) + abs(1 - c)))
    measured = noise.measure(rules.released_disk(kappa, gamma))
    assert measured.multiplier == pytest.approx(formula, rel=0.01)
    assert measured.first == pytest.approx(1 / (2 * math.hypot(c, 1 - c)), rel=0.05)


@pytest.mark.parametrize(
    ("k", "t", "wanted"),
    [(2, 1, [1, 0]), (2, 5, [5, 3]), (3, 5, [5, 3, 2]), (4, 5, [5, 3, 2, 1]), (4, 0, [0] * 4)],
)
def test_released_pmlf_omits_last_iterate(k, t, wanted):
    points = rules.released_pmlf(k).points(np.arange(t + 1.0), t)
    assert [(weight, x) for weight, x in points] == [(1.0, x) for x in wanted]


def test_steps_of_released_disk_have_length_of_rate():
    start, batches, draws = _problem()
    iterates = _run(rules.released_disk(0.7, 0.5), start, batches, draws, 0.3)
    np.testing.assert_allclose(np.linalg.norm(np.diff(iterates, axis=0), axis=1), 0.3)


@pytest.mark.parametrize(
    "rule",
    [
        rules.dp_sgd(),
        rules.dp_sgd(new_filter=FILTER),
        rules.paper_pmlf(3, 0.5, FILTER),
        rules.paper_disk(0.7, 0.1),
        rules.released_disk(0.7, 3 / 7),
    ],
)
def test_published_rules_have_calibrated_noise(rule):
    assert noise.measure(rule).multiplier == pytest.approx(1.0, rel=0.01)


def test_true_epsilon_of_released_pmlf():
    setting = next(s for s in noise.settings() if s.name == "DP-PMLF, k = 2; MNIST")
    sigma, true = setting.prices(1.0, noise.measure(setting.rule))
    assert sigma == pytest.approx(2.836, abs=0.02)
    assert true == pytest.approx(2.23, abs=0.03)  # RELEASED CODE, section 1
    assert true > 2.0


def test_corrected_filter_passes_a_constant():
    found = rules.LowPass((0.05, 0.05), (-0.9,))
    assert [round(float(found(np.ones(()))), 2) for _ in range(3)] == [1.0, 1.0, 1.0]


def _attack(rule, *, sigma, steps=6, dimension=16, trials=20_000, seed=0):
    """Returns the errors of an attack that sees only the last iterate, in full batches of C = 1.

    The canary's gradient is large and constant. All other examples add zero. Thresholds come from
    other runs.
    """
    rng = np.random.default_rng(seed)

    def scores(included, runs):
        total = np.zeros(dimension)
        total[0] = included
        start, rates = np.zeros((runs, dimension)), [[1.0] * steps]
        draws = (sigma * rng.normal(size=start.shape) for _ in range(steps))
        sums = [lambda combined: [sum(w for w, _ in points) * total for points in combined]] * steps
        *_, last = rules.run([rule], start, sums, draws, rates=rates, batch_size=1)
        return -last[0][:, 0]

    thresholds = np.quantile(np.append(scores(1, 1000), scores(0, 1000)), np.linspace(0, 1, 21))
    return auditing.trade_off_curve(scores(1, trials), scores(0, trials), thresholds)


def _claim(sigma, steps=6):
    return auditing.gaussian_trade_off(math.sqrt(steps) / sigma)


@pytest.mark.parametrize("rule", [rules.released_pmlf(2), rules.released_disk(0.7, 0.5)])
def test_attack_refutes_stated_epsilon(rule):
    stated = accounting.planned_guarantee(
        noise_multiplier=4.0, steps=6, sampling_probability=1.0
    ).epsilon(1e-2)
    curve = _attack(rule, sigma=4.0)
    assert curve.refutes(auditing.approximate_trade_off(stated, 1e-2))
    assert curve.refutes(_claim(4.0))


@pytest.mark.parametrize(
    "rule",
    [
        rules.dp_sgd(),
        rules.dp_sgd(normalize=True),
        rules.paper_pmlf(2, 0.1, lambda: lambda g: g),
        rules.paper_disk(0.7, 0.5, normalize=True),
        rules.released_pmlf(2).scaled_noise(2.0),
    ],
)
def test_attack_does_not_refute_published_rules(rule):
    assert not _attack(rule, sigma=4.0).refutes(_claim(4.0))


def test_one_example_moves_geodp_baseline_by_whole_bound():
    one, size = np.zeros(50), 64
    one[0] = 1e3 / size  # one example of 64
    zero = np.zeros(50)
    moved = dp_branch(one, 0.1, size, zero) - dp_branch(zero, 0.1, size, zero)
    assert np.linalg.norm(moved) == pytest.approx(0.1)
    turned = dp_branch(-one, 0.1, size, zero) - dp_branch(one, 0.1, size, zero)
    assert np.linalg.norm(turned) == pytest.approx(0.2)


def test_geodp_divides_angle_noise_by_batch_size():
    mean, noise_ = np.array([0.3, -0.1, 0.2, 0.05]), np.zeros(4)
    before = geodp_branch(mean, 0.1, 64, noise_, beta=0.1)
    np.testing.assert_allclose(before, mean, atol=1e-12)
    noise_[1] = 1e-4
    after = geodp_branch(mean, 0.1, 64, noise_, beta=0.1)
    angles = [np.arccos(step[0] / np.linalg.norm(step)) for step in (before, after)]
    wanted = math.sqrt(6) * 0.1 * math.pi * 1e-4 / 64
    assert angles[1] - angles[0] == pytest.approx(wanted, rel=1e-3)


def _problem(steps=12, dimension=3, batch=4, seed=5):
    rng = np.random.default_rng(seed)
    examples = rng.normal(size=(steps, batch, dimension))
    return rng.normal(size=dimension), examples, 0.1 * rng.normal(size=(steps, dimension))


def _gradient(x, example):
    return np.sin(x) * example + example


def _run(rule, start, batches, draws, rate):
    def clipped_sums(batch):
        def sums(combined):
            return [
                sum(
                    pmlf_oracle.private_mean(
                        [sum(w * _gradient(x, e) for w, x in points)], 1.0, 0.0
                    )
                    for e in batch
                )
                for points in combined
            ]

        return sums

    size = len(batches[0])
    steps = rules.run(
        [rule],
        start,
        map(clipped_sums, batches),
        size * draws,
        rates=[[rate] * len(batches)],
        batch_size=size,
    )
    return np.stack([start, *(x for (x,) in steps)])


def test_published_rules_match_oracles():
    start, batches, draws = _problem()
    found = _run(rules.paper_disk(0.7, 0.5), start, batches, draws, 0.3)
    wanted = disk_oracle.disk(
        start,
        batches,
        _gradient,
        kappa=0.7,
        gamma=0.5,
        optimizer_update=disk_oracle.sgd(0.3),
        clip_norm=1.0,
        noise=draws,
    )
    np.testing.assert_allclose(found, wanted)
    found = _run(rules.paper_pmlf(3, 0.5, FILTER), start, batches, draws, 0.3)
    wanted = pmlf_oracle.pmlf(
        start,
        batches,
        _gradient,
        eta=0.3,
        clip_norm=1.0,
        length=3,
        beta=0.5,
        b=(0.15, -0.05),
        a=(-0.9,),
        noise=draws,
    )
    np.testing.assert_allclose(found, wanted)


def test_linear_model_sums_match_per_example_gradients():
    rng = np.random.default_rng(1)
    inputs, labels = rng.normal(size=(5, 4)), rng.integers(10, size=5)
    points = [rng.normal(size=(2, 40)) for _ in range(2)]

    def gradient(x, row, label):
        logits = row @ x.reshape(4, 10)
        residual = np.exp(logits) / np.exp(logits).sum() - np.eye(10)[label]
        return np.outer(row, residual).ravel()

    combined = ((0.7, points[0]), (0.3, points[1]))
    first, second = linear_model.automatic_sums(inputs, labels, 0.01)(
        [combined, ((1.0, points[0]),)]
    )
    for run in range(2):
        by_example = [
            [gradient(x[run], row, label) for x in points]
            for row, label in zip(inputs, labels, strict=True)
        ]
        mixed = [0.7 * a + 0.3 * b for a, b in by_example]
        wanted = sum(g / (np.linalg.norm(g) + 0.01) for g in mixed)
        np.testing.assert_allclose(first[run], wanted)
        wanted = sum(g / (np.linalg.norm(g) + 0.01) for g, _ in by_example)
        np.testing.assert_allclose(second[run], wanted)


def _records(problem, seeds=3):
    return [
        decomposition.Record(name, arm.name, epsilon, arm.private, seed, 1.0, arm.rate, 0.8, {})
        for name, comparison in decomposition.comparisons(problem).items()
        for arm in comparison.arms
        for epsilon in problem.epsilons
        for seed in range(seeds)
    ]


def test_page_has_every_arm_and_part(tmp_path):
    runs = {name: _records(problem) for name, problem in PROBLEMS.items()}
    text = tables.page(runs, [("DP-SGD", *["1"] * 7)], [("1", *["2"] * 6)])
    for problem in PROBLEMS.values():
        for name, comparison in decomposition.comparisons(problem).items():
            section = text.split(f"## {name}: a linear model on {problem.title}\n")[1]
            section = section.split("\n## ")[0]
            assert all(f"ε = {epsilon:g} " in section for epsilon in problem.epsilons)
            assert all(f"| {arm.name} " in section for arm in comparison.arms)
    assert "+0.00 ± 0.00" in text
    tables.draw(tables.shown_in_figure(runs), tmp_path / "parts.png")
    assert (tmp_path / "parts.png").stat().st_size > 1000


def test_does_not_retrain_finished_seeds(tmp_path, monkeypatch):
    path, trained = tmp_path / "records.jsonl", []
    problem = PROBLEMS["linear-mnist"]._replace(epsilons=(1.0, 3.0))
    records = _records(problem, 1)

    def train(problem, name, epsilon, data, seed):
        trained.append((name, epsilon, seed))
        return [r for r in records if (r.comparison, r.stated_epsilon) == (name, epsilon)]

    monkeypatch.setattr(decomposition, "_train", train)
    monkeypatch.setattr(decomposition, "load", lambda spec: spec)
    found = decomposition.compare(problem._replace(epsilons=(1.0,)), tmp_path, path, seeds=1)
    assert trained == [("DP-PMLF", 1.0, 0), ("DiSK", 1.0, 0)]
    found = decomposition.compare(problem, tmp_path, path, seeds=1)
    assert trained[2:] == [("DP-PMLF", 3.0, 0), ("DiSK", 3.0, 0)]
    assert decomposition.compare(problem, tmp_path, path, seeds=1) == found
    assert decomposition.read(path) == found
    assert len(trained) == 4


def test_halved_images_are_means_of_four_pixels():
    images = np.arange(2 * 4 * 4 * 3, dtype=np.float32).reshape(2, 4, 4, 3)
    found = Halved().transform((4, 4, 3))(images)
    assert found.shape[1:] == Halved().shape((4, 4, 3)) == (2, 2, 3)
    np.testing.assert_allclose(found[1, 0, 1], images[1, :2, 2:].mean(axis=(0, 1)))


def test_composed_features_apply_maps_in_order():
    images = np.arange(2 * 8 * 8 * 3, dtype=np.float32).reshape(2, 8, 8, 3)
    composed, halved = Composed(Halved(), Halved()), Halved()
    found = composed.transform((8, 8, 3))(images)
    assert found.shape[1:] == composed.shape((8, 8, 3)) == (2, 2, 3)
    once = halved.transform((8, 8, 3))(images)
    np.testing.assert_allclose(found, halved.transform((4, 4, 3))(once))
    assert composed.name == "halved-halved"


def test_command_refuses_zero_seeds(tmp_path, capsys):
    assert main(["released-code", "--seeds", "0", "--folder", str(tmp_path)]) == 2
    assert "`seeds` must be at least 1, got 0." in capsys.readouterr().err
