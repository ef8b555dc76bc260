"""From a prompt set to a store: the extraction client, its plan, and the check that the store is complete."""
