"""What an operator types: each command looks at a daemon, changes it, or says what works here."""
