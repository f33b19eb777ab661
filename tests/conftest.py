"""Settings for every test."""

import torch

# Everything here is tiny: a second thread gains nothing, and on a busy machine its spinning cost tests a minute each.
torch.set_num_threads(1)
