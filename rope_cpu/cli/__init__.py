"""The command `rope-cpu`."""
