"""How time is taken, and what noisy timings allow to be said."""
