"""What the vLLM tests share: a tiny model, real engines, and a scheduler with fake workers."""
