"""What authors of plugins test with. Imported by tests only."""
