"""What the engine is compared with: Hugging Face in its own words, on the same load, in the same run."""
