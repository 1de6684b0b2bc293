"""Facts about model types, as JSON: read through rope_cpu._models."""
