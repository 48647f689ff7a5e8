"""What a person can see of a step: traces, reports, pictures."""
