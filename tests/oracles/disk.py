"""DiSK (Zhang et al. 2024), Algorithm 3 and its appendices A.3 and A.4."""

import numpy as np

from tests.oracles import private_mean


def sgd(eta):
    """OptimizerUpdate of line 7 as plain SGD."""
    return lambda x, g: x - eta * g


def disk(x0, batches, gradient, *, kappa, gamma, optimizer_update, clip_norm, noise):
    """Lines 1–9. `optimizer_update(x, g)` is line 7 and may hold state."""
    x = np.array(x0, np.float64)
    filtered, d = None, np.zeros_like(x)  # line 2
    c = (1 - kappa) / (kappa * gamma)
    iterates = [x]
    for batch, w in zip(batches, noise, strict=True):  # lines 3 and 4
        combined = [
            c * gradient(x + gamma * d, example) + (1 - c) * gradient(x, example)
            for example in batch
        ]
        g = private_mean(combined, clip_norm, w)  # line 5
        filtered = g if filtered is None else filtered  # line 2, g̃_{-1} = g_0
        filtered = (1 - kappa) * filtered + kappa * g  # line 6
        new = optimizer_update(x, filtered)  # line 7
        d = new - x  # line 8
        x = new
        iterates.append(x)
    return np.stack(iterates)


def disk_hessian(
    x0, batches, gradient, hessian_product, *, kappa, optimizer_update, clip_norm, noise
):
    """The limit γ → 0 of line 5: ∇f + (1 - κ)/κ · H d, with `hessian_product(x, example, d)`."""
    x = np.array(x0, np.float64)
    filtered, d = None, np.zeros_like(x)
    iterates = [x]
    for batch, w in zip(batches, noise, strict=True):
        combined = [
            gradient(x, example) + (1 - kappa) / kappa * hessian_product(x, example, d)
            for example in batch
        ]
        g = private_mean(combined, clip_norm, w)
        filtered = g if filtered is None else (1 - kappa) * filtered + kappa * g
        new = optimizer_update(x, filtered)
        d, x = new - x, new
        iterates.append(x)
    return np.stack(iterates)


def kalman_recursion(p, steps, *, var_w, var_v, var_h):
    """A.3, step 3: (p_t, k_t) for t = 0 … steps - 1 from p = p_{-1}."""
    trace = []
    for _ in range(steps):
        predicted = p + var_h + var_v
        k = predicted / (predicted + var_w - var_h)
        p = (1 - k) * predicted
        trace.append((p, k))
    return np.array(trace)


def nesterov(x0, steps, full_gradient, *, eta, mu, look_ahead, first):
    """Eq. (16): m_t = μm_{t-1} + η∇F(x_t - look_ahead·m_{t-1}), x_{t+1} = x_t - m_t.

    Nesterov's method has look_ahead = μ. The paper equates it with DiSK at γ = (1 - κ)/κ, under η =
    κ and μ = 1 - κ. But DiSK with SGD of step η' has m = η'g̃, thus η = η'κ and a look-ahead of
    μ/(1 - μ), longer than μ. `first` is m_0, because DiSK starts at g̃_0 = g_0.
    """
    x, m = np.array(x0, np.float64), np.asarray(first, np.float64)
    iterates = [x, x - m]
    for _ in range(steps - 1):
        x = iterates[-1]
        m = mu * m + eta * full_gradient(x - look_ahead * m)
        iterates.append(x - m)
    return np.stack(iterates)


def storm(x0, batches, gradient, *, eta, alpha):
    """Eq. (17), with m_0 the first gradient."""
    x = np.array(x0, np.float64)
    m, previous = None, x
    iterates = [x]
    for batch in batches:
        g = np.mean([gradient(x, example) for example in batch], axis=0)
        g_previous = np.mean([gradient(previous, example) for example in batch], axis=0)
        m = g if m is None else (1 - alpha) * m + alpha * g + (1 - alpha) * (g - g_previous)
        previous, x = x, x - eta * m
        iterates.append(x)
    return np.stack(iterates)
