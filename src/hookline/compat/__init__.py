"""Other libraries' own interfaces, over hookline: change the import, keep the code."""
