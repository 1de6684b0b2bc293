"""Facts about model types as JSON, and the config of Llama 3.1 8B, the default of `rope-cpu`."""
