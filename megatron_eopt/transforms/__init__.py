"""What changes an update between its orthogonal factor and the weight: a file each, chosen by a group's settings."""
