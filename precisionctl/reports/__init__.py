"""What inspect, compare and the demo show: the data of tables, pages and plots."""
