"""The core's decisions again: the recorded events to a fresh core, its commands against the recorded ones."""
