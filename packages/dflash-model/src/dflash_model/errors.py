"""The one exception that means: the user can fix this."""


class UserError(ValueError):
    """A wrong setting, file or model, told in one sentence.

    The message names the dotted key or the file, the value found and what is allowed. The command-line tools
    print it without a traceback and exit with code 2; a library caller sees an ordinary ``ValueError``.
    """
