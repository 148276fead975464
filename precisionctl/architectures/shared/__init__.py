"""Groups of rows, and of keys of config.json, that the tables of several families share."""
