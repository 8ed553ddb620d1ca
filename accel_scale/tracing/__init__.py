"""Facts and bytes of models that are not modelled by hand, from one fake step of their real classes."""
