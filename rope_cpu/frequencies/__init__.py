"""From numbers to `RopeSpec`: rope types, scaling sections, several axes and generators."""
