"""What may follow the noise: filters, Kalman gains, Adam with a filter. Post-processing."""
