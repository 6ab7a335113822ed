"""What a `Result` shows of its values: the largest cells, plots and pages."""
