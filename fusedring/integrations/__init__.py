"""fusedring inside other people's trainers."""
