"""Trains private models of images on features of a network with published weights."""
