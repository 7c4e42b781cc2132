"""What methods share: configs, the registry, the way from a call to a method, families of methods."""
