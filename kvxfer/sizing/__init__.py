"""How many bytes of KV a model's requests have, and how long links take to carry them."""
