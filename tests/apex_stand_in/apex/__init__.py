"""What megazero calls of NVIDIA's apex, on a CPU, with the signatures of its public source (July 2026)."""
