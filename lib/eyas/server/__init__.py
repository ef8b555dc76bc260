"""Start, wait for, inspect and stop an SGLang server."""
