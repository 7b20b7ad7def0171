"""The private parts of Tornado that this project uses, each tested in tests/core/private."""

from tornado.httputil import HTTPServerRequest


def body_is_whole(request: HTTPServerRequest) -> bool:
    """Whether all of a body that a handler takes in pieces has come, or its connection was lost."""
    return request._body_future.done()


def forget_body(request: HTTPServerRequest) -> None:
    """Deletes the future of such a body, which holds the handler by the frames of the error in it."""
    del request._body_future
