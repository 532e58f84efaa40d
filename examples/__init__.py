"""What runs without a download: small checkpoints, a served demo and its client."""
