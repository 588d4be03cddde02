"""The two ways a command ends badly. `common.run.command_line` turns them into one message and an exit status."""


class InputError(Exception):
    """What the user gave cannot work (a flag, an id, a file, a folder). Exit status 2; the message names the cure."""


class RunError(Exception):
    """The run itself failed (a non-finite loss, a full disk). Exit status 1; the message says where and what to do."""
