"""From a gradient's hook to the averaged `.grad`."""
