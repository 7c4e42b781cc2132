"""nearfar: landmarks, near keys, its two forms, its bound of the error (auto), and the cache that grows."""
