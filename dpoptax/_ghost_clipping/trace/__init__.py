"""Reads a traced loss: where its parameters meet the data of an example."""
