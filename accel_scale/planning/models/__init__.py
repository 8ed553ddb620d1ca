"""From a model's configuration to the facts that planning needs: parameters, layers, attention."""
