"""torchao's CPU-offloaded AdamW, adapted to gradients that change after the backward pass."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def offload_optimizer_class() -> type:
    """A subclass of torchao's `CPUOffloadOptimizer` that uses the gradients as they are at the step.

    torchao copies each gradient to host memory as soon as the backward pass has computed it. Any later change, above
    all clipping, would be silently lost; here a changed gradient is copied again before the step, at the price of one
    more transfer (none with ``--max_grad_norm 0``). It also has the `state` and `defaults` that schedules and
    Accelerate read.
    """
    import torch
    from torchao.optim import CPUOffloadOptimizer

    class OffloadedAdamW(CPUOffloadOptimizer):
        """AdamW whose states and step are in host memory; tensors below `minimal_size` values stay on the device."""

        # Weight decay is an explicit argument, so that code that builds optimizers sees it; the default is torch's.
        def __init__(self, params: Any, *, weight_decay: float = 1e-2, **kwargs: Any) -> None:
            kwargs["weight_decay"] = weight_decay
            super().__init__(params, torch.optim.AdamW, **kwargs)
            self.defaults = {k: v for k, v in kwargs.items() if k not in ("offload_gradients", "minimal_size")}
            self._copied_versions: dict[torch.Tensor, int] = {}
            for parameter in self.param_d2h_map:
                # Hooks run in order of registration: this one after torchao's, which makes the copy.
                parameter.register_post_accumulate_grad_hook(self._remember_version)

        def _remember_version(self, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:  # None with offload_gradients
                self._copied_versions[parameter] = parameter.grad._version

        def _copy_changed_gradients(self) -> None:
            module = getattr(torch, self.device)
            self.stream.wait_stream(module.current_stream())
            with module.stream(self.stream):
                for parameter in self.queue:
                    gradient = parameter.grad
                    if gradient is None or gradient._version == self._copied_versions.get(parameter):
                        continue
                    self.param_d2h_map[parameter].grad.copy_(gradient, non_blocking=True)
                    self.queue[parameter] = self.stream.record_event()

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            """Step on the current gradients."""
            self._copy_changed_gradients()
            return super().step(closure)

        @property
        def state(self) -> dict[torch.Tensor, Any]:
            """States of all parameters; those in host memory are keyed by their host copy."""
            optimizers = [*self.optim_dict.values(), *([self.d_opt] if self.d_opt is not None else [])]
            return {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}

    return OffloadedAdamW
