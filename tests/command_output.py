"""What commands print to standard error: lines about their progress, and at the end the sentence of a mistake."""


def error_line(printed: str) -> str:
    """Return the sentence of a failed command with its line end; it is the last line and the only one of its kind.

    >>> error_line("Reading runs/a ...\\ndither: error: There is no run 'runs/a'.\\n")
    "dither: error: There is no run 'runs/a'.\\n"
    """
    lines = printed.splitlines()
    assert [line.startswith("dither: error: ") for line in lines] == [False] * (len(lines) - 1) + [True], printed
    assert "Traceback" not in printed
    return f"{lines[-1]}\n"
