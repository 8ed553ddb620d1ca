"""Records the operations between a model's last hidden states and its logits."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

# Operations of a matrix product with bias, and those that only change the result's shape or dtype.
_PRODUCT = {
    "_to_copy", "_unsafe_view", "add", "addmm", "alias", "bmm", "clone", "detach", "device", "expand", "mm", "permute",
    "select", "slice", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip
_FACTOR, _CAP = {"div", "mul"}, {"tanh"}


class HeadOperations(TorchDispatchMode):
    """Records operations from `begin` on.

    Args:
        transform: Cap and factor of the logits in the configuration, as read by `head_transform`.
    """

    def __init__(self, transform: tuple[float | None, float]) -> None:
        super().__init__()
        self._softcap, self._factor = transform
        self._watches = False
        self._names: set[str] = set()

    def begin(self) -> None:
        """Start recording; call when the last hidden states are computed."""
        self._watches = True

    @property
    def is_own(self) -> bool:
        """True if the logits are more than a product with the configuration's cap and factor."""
        known = set(_PRODUCT)
        known |= _FACTOR if self._factor != 1.0 else set()
        known |= _FACTOR | _CAP if self._softcap is not None else set()
        return not self._names <= known

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        if self._watches:
            name = func.overloadpacket.__name__
            is_nothing = name in _FACTOR and len(args) > 1 and isinstance(args[1], (int, float)) and args[1] == 1.0
            self._names |= set() if is_nothing else {name}
        return func(*args, **(kwargs or {}))
