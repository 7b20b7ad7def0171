"""What is timed by hand, and not by the tests."""
