"""What config.json says: a family's table of fields, groups of fields, those that change nothing or are refused."""
