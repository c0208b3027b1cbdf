"""The corpus, vocabulary and training of the bundled model k3-nano."""
