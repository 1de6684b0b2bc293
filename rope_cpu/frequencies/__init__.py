"""From numbers to the frequencies of a rotation: the spec, and what makes one."""
