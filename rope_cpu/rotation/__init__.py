"""The rotation of arrays: rotary embeddings and plans."""
