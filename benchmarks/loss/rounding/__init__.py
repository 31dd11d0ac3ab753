"""What rounding costs a trained model: gradients of one step, weights and differences, keys, training on."""
