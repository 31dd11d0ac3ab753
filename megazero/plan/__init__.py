"""This says what a configuration will cost, from sizes alone. It needs no torch and no numpy."""
