"""What several test modules use: targets, drafters, stores and stand-ins for servers."""
