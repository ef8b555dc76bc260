"""Studies of many trainings or servers: boundaries, sweeps, server settings."""
