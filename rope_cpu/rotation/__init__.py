"""The rotation of arrays: rotary embeddings, plans, cos and sin, and the call of the kernel."""
