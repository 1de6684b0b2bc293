"""The rotations to time, of rope_cpu and of other libraries, each used as its users use it."""
