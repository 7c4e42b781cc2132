"""What several test files share. A test file imports no other test file."""
