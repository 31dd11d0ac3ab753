"""What a run writes for people and programs: metrics, console, loggers, history, exit status."""
