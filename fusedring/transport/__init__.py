"""How ranks find each other, share memory, signal, compare what they are about to do, and learn that one is gone."""
