"""Numbers about stored states, prompts, responses and vocabulary."""
