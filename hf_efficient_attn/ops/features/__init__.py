"""Linear attention: feature maps, sums over tokens, and features beside a window."""
