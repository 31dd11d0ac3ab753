"""From flags and files to a configuration: sources are read, merged, completed and checked. No torch."""
