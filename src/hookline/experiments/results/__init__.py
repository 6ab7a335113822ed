"""What a `Result` does with its values: statistics, arithmetic, the largest cells, files, plots and pages."""
