"""What torch.compile may see of our code, and compiled code while hooks are attached."""
