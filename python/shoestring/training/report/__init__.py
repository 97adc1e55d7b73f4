"""Write and read the metrics of runs, and draw and write their reports."""
