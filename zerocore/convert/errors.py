"""How errors of other libraries are told."""


def summary(error: BaseException) -> str:
    """Its type and the first line of its text: some texts are pages of advice."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
