"""What survives a run that ends: `store` is the form on disk and its one commit point, `saver` when to save and what to keep."""
