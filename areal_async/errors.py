"""Every error that areal-async raises on purpose.

What always holds: each message says what is wrong, where (file, server, step, sample) and what to do about it, so the
command line can print it without a traceback. An exception of any other class that reaches the user is a bug of ours.
"""


class ArealError(Exception):
    """Base of all; the command line prints it as one message and exits with 1."""


class ConfigError(ArealError):
    """The configuration (or the command line) is wrong; known before anything was started; exit code 2."""


class DataError(ConfigError):
    """A data file is wrong; the message begins with `file:line:`; exit code 2."""


class LaunchError(ArealError):
    """A child process did not start, or ended; the message has the tail of its stderr."""


class ServerError(ArealError):
    """A rollout server answered wrongly, too late or not at all."""


class HandshakeError(ServerError):
    """A rollout server can't be used for this run: another model, missing routes, other log-probabilities."""


class TrainerError(ArealError):
    """A trainer rank failed, or answered something that can't be right."""


class RewardError(ArealError):
    """A reward function can't be loaded or used."""


class WireError(ArealError):
    """A message between processes is malformed, refused, or wasn't answered in time."""


class NoAnswer(WireError):
    """A worker that is there has not answered within the deadline."""


class LogError(ArealError):
    """The run log can't be written, or what is in it can't be right."""


class DiskFull(LogError):
    """There is no room to write the run log. Nothing is lost; writing goes on, where it stopped, once there is room."""


class Released(LogError):
    """The arrays of a sample were deleted because nobody can ask for them again; the decisions are kept."""


class IllegalTransition(ArealError):
    """A life cycle was asked for a transition that its table doesn't have; the message holds the thing's story."""


class RunFailed(ArealError):
    """A run stopped before its end; the message is the first cause."""
