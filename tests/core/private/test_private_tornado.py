"""The private parts of Tornado do what core/private/tornado.py says."""

import asyncio

from tornado.httpclient import AsyncHTTPClient
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler, stream_request_body

from lingvo_moe.core.private.tornado import body_is_whole, forget_body


@stream_request_body
class _Upload(RequestHandler):
    whole: list[bool] = []

    def data_received(self, chunk: bytes) -> None:
        self.whole.append(body_is_whole(self.request))

    def post(self) -> None:
        self.whole.append(body_is_whole(self.request))
        forget_body(self.request)


async def _upload() -> int:
    server = HTTPServer(Application([("/", _Upload)]))
    (socket,) = bind_sockets(0, "127.0.0.1")
    server.add_sockets([socket])
    try:
        url = f"http://127.0.0.1:{socket.getsockname()[1]}/"
        return (await AsyncHTTPClient().fetch(url, method="POST", body=b"body")).code
    finally:
        server.stop()


def test_a_body_is_whole_once_its_last_piece_has_come():
    assert asyncio.run(_upload()) == 200
    assert _Upload.whole == [False, True]
