"""Are a store's states the right ones? Checks, references, injected faults, the certificate."""
