"""What keeps a run alive or ends it: watch, guards, signals, stragglers, health checks."""
