"""The replica step, the Keras integration (`prepare`), the custom loop (`TrainLoop`) and checkpoints."""
