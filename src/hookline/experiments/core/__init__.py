"""What all experiments share: prompts, sweeps, measuring, labels."""
