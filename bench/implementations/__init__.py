"""The rotations to time, of rope_cpu and of other libraries, each called as its users call it."""
