"""Which operations a model does between its last hidden states and its logits."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

# Of a product with a matrix and a bias, and what only looks at its result in another shape or type.
_PRODUCT = {
    "_to_copy", "_unsafe_view", "add", "addmm", "alias", "bmm", "clone", "detach", "device", "expand", "mm", "permute",
    "select", "slice", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip
_FACTOR, _CAP = {"div", "mul"}, {"tanh"}


class HeadOperations(TorchDispatchMode):
    """Watches from `begin` on.

    Args:
        transform: Cap and factor of the logits that the configuration states, as `head_transform` reads them.
    """

    def __init__(self, transform: tuple[float | None, float]) -> None:
        super().__init__()
        self._softcap, self._factor = transform
        self._watches = False
        self._names: set[str] = set()

    def begin(self) -> None:
        """The last hidden states are there."""
        self._watches = True

    @property
    def is_own(self) -> bool:
        """Whether the logits are more than a product with the cap and the factor that the configuration states."""
        known = set(_PRODUCT)
        known |= _FACTOR if self._factor != 1.0 else set()
        known |= _FACTOR | _CAP if self._softcap is not None else set()
        return not self._names <= known

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        if self._watches:
            name = func.overloadpacket.__name__
            is_nothing = name in _FACTOR and len(args) > 1 and args[1] == 1.0 and isinstance(args[1], (int, float))
            self._names |= set() if is_nothing else {name}
        return func(*args, **(kwargs or {}))
