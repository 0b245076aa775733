"""Shardwise beside other ways to train the same model, measured in one run."""
