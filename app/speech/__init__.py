"""Where somebody speaks: voice activity, and the cutting of audio into windows of speech."""
