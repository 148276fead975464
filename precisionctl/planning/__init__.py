"""What a conversion will do, settled from names, shapes and dtypes before any tensor is read."""
