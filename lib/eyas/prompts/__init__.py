"""Conversations, chat template, loss mask, responses."""
