"""Checks of arguments and their error texts."""
