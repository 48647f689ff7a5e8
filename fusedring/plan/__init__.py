"""What is to be done, as values: plans, their walk, launches, the choice of algorithm."""
