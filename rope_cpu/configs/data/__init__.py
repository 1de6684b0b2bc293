"""Facts about models, as JSON: what model types leave unsaid, and the config that `rope-cpu` knows by itself."""
