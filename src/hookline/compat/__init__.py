"""The interfaces of other libraries, on top of hookline: change the import and keep your code."""
