"""Pages: the script, the style and the HTML document of everything that hookline shows in a browser."""
