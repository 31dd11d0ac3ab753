"""Pipeline parallelism. ``partition``, ``schedules`` and ``timeline`` are pure: no torch, no numpy."""
