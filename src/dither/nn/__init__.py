"""Layers in few bits, and the conversion of models to them."""
