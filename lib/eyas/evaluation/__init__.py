"""How much of a draft is accepted, how fast that is, and the verdict."""
