"""Serve an exported model over HTTP, with the standard library, NumPy and onnxruntime; no torch, no lpbnn.

    lpbnn export RUN -o model.onnx
    python examples/serve.py model.onnx --port 8000
    curl -s localhost:8000/predict -d '{"inputs": [[0.1, 0.2, 0.3, 0.4]]}'

- POST /predict: ``{"inputs": [...]}`` as JSON, or the bytes of an ``.npy`` file; a batch, (examples, ...).
  The answer has every output of the graph by name.
- GET /health: ``{"status": "ok"}``
- GET /: inputs, outputs and properties of the model (class names, method, temperature, level, version, ...)

A request that is wrong gets an ``{"error": ...}`` that says how to mend it. onnxruntime sessions may run in
several threads at once, and nothing else is shared by requests. Put it behind a proxy for TLS and
authentication.
"""

import argparse
import io
import json
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import onnxruntime

MAX_BYTES = 16 * 2**20  # of a request's body
TYPES = {"float": np.float32, "double": np.float64, "uint8": np.uint8, "int64": np.int64}


class Refused(Exception):
    """A request that is not answered: its HTTP status, what is wrong and how to mend it."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


def wrong(text: str) -> Refused:
    """Return the refusal of a bad input."""
    return Refused(HTTPStatus.BAD_REQUEST, text)


class Model:
    """An exported model with one input.

    Args:
        path: of the ONNX file.
        threads: of one request; the requests run beside each other.
    """

    def __init__(self, path: str, threads: int = 1) -> None:
        onnxruntime.disable_telemetry_events()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(path, options, providers=providers)
        inputs = self.session.get_inputs()
        if len(inputs) != 1:
            raise SystemExit(
                f"{path} has {len(inputs)} inputs; this service is for models with one."
            )
        self.name, self.shape = inputs[0].name, tuple(inputs[0].shape[1:])
        self.dtype = np.dtype(TYPES[inputs[0].type[7:-1]])
        self.outputs = [one.name for one in self.session.get_outputs()]
        properties = self.session.get_modelmeta().custom_metadata_map
        self.about = {
            "input": {"type": str(self.dtype), "shape": ["batch", *self.shape]},
            "outputs": {one.name: one.shape for one in self.session.get_outputs()},
            "properties": {name: _parsed(value) for name, value in properties.items()},
        }

    def predict(self, inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Return the outputs by name for a batch of inputs."""
        values = self.session.run(self.outputs, {self.name: self._checked(inputs)})
        found: dict[str, Any] = dict(zip(self.outputs, values, strict=True))
        if not all(np.isfinite(value).all() for value in found.values()):
            raise wrong("the outputs for these inputs are not finite. Fix: smaller numbers.")
        return found

    def _checked(self, inputs: np.ndarray) -> np.ndarray:
        """Return a batch in the model's type; refuse what would be changed by that, or has another shape."""
        if inputs.dtype.kind not in "biuf":
            raise wrong(f"the inputs are {inputs.dtype}. Fix: numbers, equally many in each row.")
        if inputs.ndim == 0 or inputs.shape[1:] != self.shape or not len(inputs):
            raise wrong(
                f"the inputs have shape {list(inputs.shape)}; expected {['examples', *self.shape]}, at least "
                "one example. Fix: a batch; of one example, [example]."
            )
        if not np.isfinite(inputs).all():
            raise wrong("some inputs are NaN or infinite. Fix: leave out these examples.")
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            whole = inputs.dtype.kind != "f" or bool((inputs == np.floor(inputs)).all())
            if not whole or inputs.min() < limits.min or inputs.max() > limits.max:
                raise wrong(
                    f"expected whole numbers from {limits.min} to {limits.max} ({self.dtype}). Fix: raw "
                    "values, such as pixels from 0 to 255; the normalisation is inside the model."
                )
        with np.errstate(over="ignore"):
            cast = inputs.astype(self.dtype)
        if not np.isfinite(cast).all():
            raise wrong(f"some inputs are too large for {self.dtype}. Fix: smaller numbers.")
        return cast


def read_json(body: bytes) -> np.ndarray:
    """Return the array of ``{"inputs": [...]}``."""
    if body.count(b'"') > 2:  # NumPy would give every element the room of the longest string
        raise wrong('the body holds strings. Fix: {"inputs": [...]}, numbers alone.')
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise wrong(
            f'the body is no JSON ({error}). Fix: {{"inputs": [...]}}, or the bytes of an .npy file.'
        ) from error
    if not isinstance(given, dict) or list(given) != ["inputs"]:
        raise wrong('the body is not {"inputs": [...]}. Fix: an object with this key alone.')
    try:
        return np.asarray(given["inputs"])
    except (ValueError, OverflowError) as error:
        raise wrong("the inputs are ragged. Fix: as many numbers in each row.") from error


def read_npy(body: bytes) -> np.ndarray:
    """Return the array of an ``.npy`` file; nothing is unpickled, and no memory taken for a false size."""
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0}
        readers[2, 0] = np.lib.format.read_array_header_2_0
        shape, _, dtype = readers[version](file)
        size = dtype.itemsize
        for side in shape:
            size *= side
        if dtype.hasobject or size != len(body) - file.tell():
            raise ValueError("its size is not what its head says")
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:  # bytes that are no array can fail in any way at all
        raise wrong(
            f"the body is no .npy file of numbers ({error}). Fix: numpy.save(file, array)."
        ) from error


class Handler(BaseHTTPRequestHandler):
    """One connection. ``serve`` sets the model and the limit."""

    model: Model
    max_bytes = MAX_BYTES
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds without a byte

    def do_GET(self) -> None:
        # A body is not read, and would be taken for the next request.
        self.close_connection |= bool({"Content-Length", "Transfer-Encoding"} & set(self.headers))
        pages = {"/": self.model.about, "/health": {"status": "ok"}}
        if self.path in pages:
            self._send(HTTPStatus.OK, pages[self.path])
        elif self.path == "/predict":
            self._refuse(Refused(HTTPStatus.METHOD_NOT_ALLOWED, "Fix: POST /predict."))
        else:
            self._refuse(self._unknown())

    def do_POST(self) -> None:
        try:
            if self.path != "/predict":
                raise self._unknown()
            body = self._body()
            read = read_npy if body.startswith(b"\x93NUMPY") else read_json
            found = self.model.predict(read(body))
            answer = {name: value.tolist() for name, value in found.items()}
        except Refused as error:
            self._refuse(error)
        else:
            self._send(HTTPStatus.OK, answer)

    def _body(self) -> bytes:
        lengths = self.headers.get_all("Content-Length", [])
        # A proxy may see another end of the body than this service if there is more than one length.
        if not lengths or "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Fix: a Content-Length; no chunked body.")
        given = ", ".join(lengths)
        if not (given.isascii() and given.isdigit() and len(given) < 20):
            raise wrong(f"Content-Length is {given[:40]!r}. Fix: the number of bytes of the body.")
        length = int(given)
        if length > self.max_bytes:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has {length:,} bytes, at most {self.max_bytes:,} are taken. Fix: fewer examples "
                "at once, or an .npy body.",
            )
        body = self.rfile.read(length)
        if len(body) < length:
            raise wrong(f"the body has {len(body)} of {length} bytes. Fix: send all of it.")
        return body

    def _unknown(self) -> Refused:
        text = "Fix: POST /predict, GET /health or GET /."
        return Refused(HTTPStatus.NOT_FOUND, f"there is no {self.path[:100]!r}. {text}")

    def _refuse(self, error: Refused) -> None:
        self.close_connection = True  # a body may be unread
        self._send(error.status, {"error": str(error)})

    def _send(self, status: HTTPStatus, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """A thread per connection; waiting ones are queued by the system."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error on stderr, but not that a client left before it was answered."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def serve(path: str, host: str = "127.0.0.1", port: int = 0, max_bytes: int = MAX_BYTES) -> Server:
    """Return a server for a model; ``serve_forever`` starts it. Port 0 takes a free one."""
    handler = type("Handler", (Handler,), {"model": Model(path), "max_bytes": max_bytes})
    return Server((host, port), handler)


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve an exported model over HTTP.")
    parser.add_argument("model", help="ONNX file of lpbnn export")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES, help="of a request's body")
    given = parser.parse_args()
    server = serve(given.model, given.host, given.port, given.max_bytes)
    print(f"http://{given.host}:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
