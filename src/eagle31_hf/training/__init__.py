"""Making a drafter: data, distillation (stage 1), acceptance (stage 2); `train.train_drafter` does it all."""
