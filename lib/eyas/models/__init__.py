"""The target, the drafter, its vocabulary, layer ids of every engine, export and import of drafters."""
