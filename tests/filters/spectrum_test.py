"""Tests of spectra against known processes, and of recordings of real runs."""

import dataclasses

import matplotlib.image
import numpy as np
import pytest
from scipy import signal

from dpoptax import filters
from dpoptax.filters import spectrum
from dpoptax.training import ConfigError
from dpoptax.training.run.files import params_sha256
from dpoptax.training.run.run_task import run_task
from dpoptax.training.run.seeds import key_of
from experiments import recording
from experiments.config import ExperimentConfig
from experiments.methods import Doppler, GeoDP, NonPrivate

pytestmark = pytest.mark.optimized

DOPPLER = filters.preset("doppler-first-order-1")
RUN = ExperimentConfig(
    method=Doppler(),
    model="linear",
    steps=8,
    batch_size=64,
    eval_every=8,
    epsilon=None,
    noise_multiplier=2.0,
    accountant="rdp",
    seed=0,
)


def white(steps=4096, coordinates=50, stddev=0.5, seed=0):
    return stddev * np.random.default_rng(seed).normal(size=(steps, coordinates))


def slow_signal(steps=4096, coordinates=50, pole=0.9, seed=1):
    """Returns a first-order process of variance 1 with c_τ = pole^τ."""
    start = np.random.default_rng(seed + 1).normal(size=(1, coordinates))
    drive = white(steps, coordinates, np.sqrt(1 - pole**2), seed)
    return signal.lfilter([1.0], [1.0, -pole], drive, axis=0, zi=pole * start)[0]


def test_white_noise_has_flat_spectrum():
    omega, power = spectrum.power_spectrum(white(), segment=64)
    assert (omega[0], omega[-1], power.shape) == (0.0, np.pi, (33,))
    np.testing.assert_allclose(power, 0.25, rtol=0.06)  # the ends are not halved either


def test_filter_shapes_spectrum_by_its_response():
    filtered = signal.lfilter(DOPPLER.b, [1.0, *DOPPLER.a], white(), axis=0)
    omega, power = spectrum.power_spectrum(filtered, segment=256)
    _, response = signal.freqz(DOPPLER.b, [1.0, *DOPPLER.a], worN=omega)
    expected = 0.25 * np.abs(response) ** 2
    inner = slice(4, 100)
    np.testing.assert_allclose(power[inner], expected[inner], rtol=0.15)


def test_power_integrates_to_mean_square():
    series = slow_signal() + 3.0
    omega, power = spectrum.power_spectrum(series)
    total = np.trapezoid(power, omega) / np.pi
    assert total == pytest.approx(np.mean(series**2), rel=0.05)
    assert power[0] > 100 * power[-1]


def test_autocorrelation_excludes_noise():
    noisy = slow_signal() + white(seed=5)
    found = spectrum.autocorrelation(noisy, 10, stddev=0.5)
    np.testing.assert_allclose(found, 0.9 ** np.arange(11), atol=0.05)
    assert spectrum.autocorrelation(noisy, 0)[0] == pytest.approx(1.25, abs=0.05)


def test_running_snr_follows_signal():
    noisy = white()
    noisy[2048:] += 1.0  # a signal of power 1 over noise of power 1/4
    ratio = spectrum.running_snr(noisy, 0.5, window=100)
    assert ratio.shape == (4096 - 99,)
    assert ratio[:1900].max() < 0.1
    np.testing.assert_allclose(ratio[2100:], 4.0, atol=0.3)


def test_proposed_filter_matches_true_correlations():
    noisy = slow_signal() + white(stddev=2.0, seed=5)
    proposed = spectrum.propose_filter(noisy, 2.0, length=8)
    true = 0.9 ** np.arange(8)
    np.testing.assert_allclose(proposed.b, true / true.sum(), atol=0.02)
    # Among weights of one sum, w ∝ c has the largest (c·w)²/‖w‖² (DOPPLER 5.3).
    effective = (true @ np.array(proposed.b)) ** 2 / np.sum(np.square(proposed.b))
    assert effective == pytest.approx(true @ true, rel=0.01)
    assert effective > 4  # without a filter, it is 1


def test_proposal_is_robust_to_noisy_power_estimate():
    noisy = slow_signal(400, 20) + white(400, 20, stddev=2.0, seed=5)
    proposed = spectrum.propose_filter(noisy, 2.05, length=4)  # here c_0 is below c_1
    assert spectrum.autocorrelation(noisy, 1, stddev=2.05)[0] < 0.9
    assert proposed.b[0] == max(proposed.b)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: spectrum.power_spectrum(np.ones(5)),
            r"\(steps, coord.*got shape \(5,\)",
        ),
        (lambda: spectrum.power_spectrum([[1.0], [np.nan]]), "finite"),
        (lambda: spectrum.power_spectrum(np.ones((9, 1)), segment=10), "9 recorded steps, got 10"),
        (
            lambda: spectrum.autocorrelation(np.ones((9, 1)), 9),
            r"`max_lag` .* \[0, 9\), .* got 9",
        ),
        (
            lambda: spectrum.autocorrelation(np.ones((9, 1)), 1, stddev=-1),
            "`stddev` .* got -1",
        ),
        (
            lambda: spectrum.running_snr(np.ones((9, 1)), 0.0),
            "`window` .* the 9 .* got 50",
        ),
        (
            lambda: spectrum.running_snr(np.ones((9, 1)), 0.0, window=2),
            "`stddev` must .* got 0",
        ),
        (lambda: spectrum.propose_filter(np.ones((9, 1)), 1.0, length=0), "`length` must .* got 0"),
        (
            lambda: spectrum.propose_filter([[1.0], [-1.0]], 1.0, length=2),
            "At stddev=1 the rec",
        ),
    ],
)
def test_refuses_bad_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    run = recording.record_run(RUN, 10_000)
    run.write(folder)
    return run, folder


@pytest.mark.slow
def test_recording_has_released_and_filtered_gradients(recorded):
    with np.load(recorded[1] / "recording.npz") as file:
        released, filtered = file["released"], file["filtered"]
        assert file["stddev"] == 2.0 / 64
    assert released.shape == filtered.shape == (8, 650)
    # Nearly all of the power is noise, and some comes from the gradient.
    assert 1.0 < np.mean(released**2) * 32**2 < 2.0
    a = [1.0, *DOPPLER.a]
    correction = signal.lfilter(DOPPLER.b, a, np.ones(8))[:, None]
    expected = signal.lfilter(DOPPLER.b, a, released, axis=0) / correction
    np.testing.assert_allclose(filtered, expected, atol=1e-6)
    assert matplotlib.image.imread(recorded[1] / "spectrum.png").std() > 0.05


@pytest.mark.slow
def test_recording_does_not_change_training(recorded):
    plain = run_task(RUN.task(), key=key_of(RUN.seed, "threefry"), progress=False)
    assert params_sha256(recorded[0].params) == params_sha256(plain.params)


@pytest.mark.parametrize("changes", [{"method": NonPrivate()}, {"noise_multiplier": 0.0}])
def test_refuses_to_record_gradients_without_noise(changes):
    with pytest.raises(ConfigError, match="`config` must have noise to be recorded"):
        recording.record_run(dataclasses.replace(RUN, **changes), 5)


@pytest.mark.slow
def test_noise_on_angles_has_no_single_stddev():
    config = dataclasses.replace(RUN, method=GeoDP(), steps=2)
    assert np.isnan(recording.record_run(config, 5).stddev)


def test_chooses_coordinates_of_all_leaves_without_repetition():
    chosen = recording.choose([3, 5, 1000], 900)
    assert [part.max() < size for part, size in zip(chosen, (3, 5, 1000), strict=True)]
    flat = np.concatenate([part + start for part, start in zip(chosen, (0, 3, 8), strict=True)])
    assert len(set(flat.tolist())) == 900
    assert flat.max() < 1008
    whole = recording.choose([3, 2], 5)
    assert [part.tolist() for part in whole] == [[0, 1, 2], [0, 1]]
