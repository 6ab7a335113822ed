"""The explorer: look into a model in the browser, live and offline."""
