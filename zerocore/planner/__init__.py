"""What a model needs and how fast it would train, before it is sharded."""
