"""Whose memory a tensor is in: snapshots, edits that reach the caller, copies of containers, structures of tensors."""
