"""What rounding gradients costs a real trained model: errors by kind of tensor, training on, and training anew."""
