"""How the course measures: one harness, one result format, the roofline, tables and plots made from result files."""
