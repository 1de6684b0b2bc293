"""From a model's config and tensors to a layer's attention for a NumPy server or the export."""
