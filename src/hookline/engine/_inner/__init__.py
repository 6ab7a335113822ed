"""Points inside a module: attention scores, patterns, queries and keys, the choices of routers."""
