"""Checks of arguments and their error texts; it imports nothing else of rope_cpu."""
