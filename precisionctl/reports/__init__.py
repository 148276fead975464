"""What commands show: the data of their tables, pages and plots."""
