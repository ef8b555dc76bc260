"""The target, the drafter and its vocabulary; layer ids of every engine; export and import."""
