"""What a run saves, when, and how it comes back."""
