"""From a model's config and weights to the arguments of `export_attention`."""
