"""Of apex's extension, the update: csrc/multi_tensor_adam.cu in the mode of decoupled weight decay."""


def multi_tensor_adam(
    chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay
):
    assert mode == 1 and bias_correction == 1
    for grad, param, first, second in zip(*tensor_lists, strict=True):
        first.copy_(beta1 * first + (1 - beta1) * grad)
        second.copy_(beta2 * second + (1 - beta2) * grad * grad)
        root = (second / (1 - beta2**step)).sqrt() + epsilon
        param.sub_(lr * (first / (1 - beta1**step) / root + weight_decay * param))
