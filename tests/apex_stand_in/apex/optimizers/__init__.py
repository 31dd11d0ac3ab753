"""FusedAdam: apex/optimizers/fused_adam.py."""

import amp_C
import torch


class FusedAdam(torch.optim.Optimizer):
    """The step is counted in the group, moments are fp32, and parameters are not fp64."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
    ):
        if amsgrad or capturable or master_weights:
            raise RuntimeError("the stand-in has neither")
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.adam_w_mode = int(adam_w_mode)

    def step(
        self,
        closure=None,
        grads=None,
        output_params=None,
        scale=None,
        grad_norms=None,
        grad_scaler=None,
    ):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            lists = [[], [], [], []]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dtype == torch.float64:
                    raise RuntimeError("FusedAdam only support fp16 and fp32.")
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p.data).float()
                    state["exp_avg_sq"] = torch.zeros_like(p.data).float()
                for held, x in zip(lists, (p.grad, p, *state.values()), strict=True):
                    held.append(x.detach())
            amp_C.multi_tensor_adam(
                65536,
                torch.zeros(1, dtype=torch.int),
                lists,
                group["lr"],
                *group["betas"],
                group["eps"],
                group["step"],
                self.adam_w_mode,
                int(group["bias_correction"]),
                group["weight_decay"],
            )
        return loss
