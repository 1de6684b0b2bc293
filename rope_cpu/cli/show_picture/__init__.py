"""The picture of `rope-cpu show --plot`."""
