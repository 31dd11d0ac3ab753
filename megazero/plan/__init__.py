"""What a configuration will cost, from sizes alone. No torch, no numpy."""
