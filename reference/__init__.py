"""What the stages are held against: Hugging Face as the oracle, checkpoints to run it on, and the benchmark harness."""
