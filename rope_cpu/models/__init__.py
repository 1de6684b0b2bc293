"""From a config.json, a GGUF file or the tensors of a checkpoint to plain data of a model."""
