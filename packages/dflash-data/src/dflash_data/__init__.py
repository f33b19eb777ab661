"""From conversations to the hidden states of a sharded target: torchdata pipelines over numbered packs."""
