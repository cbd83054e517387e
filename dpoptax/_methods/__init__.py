"""Methods that follow the noise: filters, Kalman gains, and Adam with a filter."""
