# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The error of this package that a user can act on."""

__all__ = ["ReportError"]


class ReportError(Exception):
    """Bad input or a report that cannot be used. The message says what was expected, what came, and the way out.

    The command line prints the message without a traceback and exits with `exit_code`.
    """

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
