"""From a published config.json to the rotation it describes: reader, adapters and model tables."""
