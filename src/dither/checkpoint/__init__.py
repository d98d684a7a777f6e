"""Checkpoints on disk: manifests, files of tensors, and the pieces of tensors that ranks hold."""
