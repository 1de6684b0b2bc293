"""Model configs that the command `rope-cpu` knows by itself."""
