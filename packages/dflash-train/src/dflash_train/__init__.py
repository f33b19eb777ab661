"""Training a drafter next to a live target: meshes, channel, loss, trainer."""
