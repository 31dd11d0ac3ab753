"""What a user may choose: every option is described once, in the dataclass of its section."""
