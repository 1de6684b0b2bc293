"""How calls are timed, and what is estimated from noisy timings."""
