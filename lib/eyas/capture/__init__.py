"""Extract a prompt set into a store: the client, its plan, and the check of the store."""
