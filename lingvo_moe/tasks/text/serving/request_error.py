"""The exception for a request that gets no translation."""

import tornado.web


class RequestError(tornado.web.HTTPError):
    """A refused request, with an HTTP status and a sentence for the client.

    `message` says what is wrong and what would be right; `retry_after`, where that helps, after how many seconds to
    try again.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None):
        super().__init__(status, message)
        self.message, self.retry_after = message, retry_after
