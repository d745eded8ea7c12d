"""Stage 1: the drafter unrolled on its own feedback, the losses, the trainer, served acceptance."""
