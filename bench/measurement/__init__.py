"""How calls are timed, and estimates from noisy timings."""
