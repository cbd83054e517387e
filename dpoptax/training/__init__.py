"""Training runs on dpoptax's public API: configs, data, models, the loop and the command line."""
