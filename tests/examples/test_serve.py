"""The HTTP service of examples/serve.py: the model's answers to many clients at once, and bad requests."""

import http.client
import io
import json
import runpy
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lpbnn

ROOT = Path(__file__).parents[2]
MODULE = runpy.run_path(str(ROOT / "examples" / "serve.py"))
NAMES = ["label", "probs", "total", "epistemic", "ood_score"]


class Pixels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float() / 255


@pytest.fixture(scope="module")
def model() -> lpbnn.UncertainModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return lpbnn.build(net, "mcdropout", members=2)


@pytest.fixture(scope="module")
def port(model: lpbnn.UncertainModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("served") / "model.onnx"
    metadata = {"classes": ["a", "b", "c"]}
    lpbnn.export_onnx(model, torch.randn(2, 4), path, metadata=metadata)
    server = MODULE["serve"](str(path), max_bytes=20_000)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def ask(
    port: int,
    body: bytes | str | None,
    path: str = "/predict",
    method: str = "POST",
    **headers: str,
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def test_many_clients_at_once_get_the_answers_of_the_model(
    port: int, model: lpbnn.UncertainModel
) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(1 + i % 7, 4, generator=generator) for i in range(120)]

    def send(i: int) -> tuple[int, Any]:
        x = batches[i].numpy()
        return ask(port, npy(x) if i % 2 else json.dumps({"inputs": x.tolist()}))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(len(batches))))
    for x, (status, found) in zip(batches, answers, strict=True):
        assert status == 200
        assert list(found) == NAMES
        p = lpbnn.predict(model, x, seed=0)
        assert found["label"] == p.labels.tolist()
        for name in NAMES[1:]:
            torch.testing.assert_close(
                torch.tensor(found[name]), getattr(p, name), atol=1e-5, rtol=1e-4
            )


def test_it_says_how_it_is_and_what_it_serves(port: int) -> None:
    assert ask(port, None, "/health", "GET") == (200, {"status": "ok"})
    status, about = ask(port, None, "/", "GET")
    assert status == 200
    assert about["input"] == {"type": "float32", "shape": ["batch", 4]}
    assert list(about["outputs"]) == NAMES
    assert about["properties"]["classes"] == ["a", "b", "c"]


def test_a_connection_can_be_used_again(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for _ in range(3):
        connection.request("POST", "/predict", json.dumps({"inputs": [[0, 1, 2, 3]]}))
        answer = connection.getresponse()
        assert answer.status == 200
        assert len(json.loads(answer.read())["probs"]) == 1
    connection.close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[" * 5000, "no JSON"),
        ("[1, 2]", 'is not {"inputs"'),
        ('{"x": [[1, 2, 3, 4]]}', 'is not {"inputs"'),
        ('{"inputs": [[1, 2], [3]]}', "ragged"),
        ('{"inputs": [["a", "b", "c", "d"]]}', "numbers alone"),
        ('{"inputs": [[{}, 0, 0, 0]]}', "Fix: numbers"),
        ('{"inputs": null}', "Fix: numbers"),
        ('{"inputs": [1, 2, 3, 4]}', "[example]"),
        ('{"inputs": [[1, 2, 3]]}', "shape [1, 3]"),
        ('{"inputs": []}', "at least one example"),
        ('{"inputs": [[NaN, 0, 0, 0]]}', "NaN or infinite"),
        ('{"inputs": [[1e300, 0, 0, 0]]}', "too large for float32"),
        (f'{{"inputs": [[1{400 * "0"}, 0, 0, 0]]}}', "Fix: numbers"),
        (npy(np.zeros((2, 4)))[:-8], "no .npy file"),
        (npy(np.array([{}])), "no .npy file"),
        (npy(np.zeros(1)).replace(b"(1,)", b"(9,)"), "no .npy file"),
        (b"\x93NUMPY", "no .npy file"),
        (npy(np.zeros(1)).replace(b"{'descr'", b"{{{{{{{{"), "no .npy file"),
        (json.dumps({"inputs": ["a" * 10_000, *["b"] * 1000]}), "holds strings"),
        (npy(np.zeros((2, 3))), "shape [2, 3]"),
    ],
)
def test_bad_inputs_are_answered_with_the_fix(port: int, body: bytes | str, message: str) -> None:
    status, found = ask(port, body)
    assert status == 400
    assert message in found["error"]
    assert "Fix:" in found["error"]


def test_bodies_are_bounded_before_they_are_read(port: int) -> None:
    status, found = ask(port, None, **{"Content-Length": "1000000000"})
    assert status == 413
    assert "at most 20,000" in found["error"]
    assert ask(port, b"x", **{"Content-Length": "many"})[0] == 400
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"411" in client.recv(1000).split(b"\r\n")[0]


def send(port: int, request: bytes) -> bytes:
    """Return everything that is answered on one connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(10_000), b""))


HIDDEN = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        (b"GET /", b"Content-Length: 36", b"200"),
        (b"GET /x", b"Content-Length: 36", b"404"),
        (b"GET /health", b"Transfer-Encoding: chunked", b"200"),
        (b"POST /predict", b"Transfer-Encoding: chunked\r\nContent-Length: 4", b"411"),
        (b"POST /predict", b"Content-Length: 4\r\nContent-Length: 5", b"400"),
        (b"POST /predict", b"Content-Length: " + b"9" * 5000, b"400"),
    ],
)
def test_a_body_is_never_taken_for_another_request(
    port: int, line: bytes, headers: bytes, status: bytes
) -> None:
    """A proxy in front, which reads the same headers in another way, would mix up its clients' answers."""
    answer = send(port, line + b" HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n" + HIDDEN)
    assert answer.count(b"HTTP/1.1") == 1
    assert status in answer.split(b"\r\n")[0]


def test_a_client_that_leaves_makes_no_noise(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    linger = struct.pack("ii", 1, 0)  # close resets the connection
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert ask(port, None, "/health", "GET")[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_a_body_that_breaks_off_is_refused(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        client.shutdown(socket.SHUT_WR)
        assert b"400" in client.recv(1000).split(b"\r\n")[0]
    assert ask(port, None, "/health", "GET")[0] == 200


def test_other_paths_and_verbs_name_those_there_are(port: int) -> None:
    for path, method, status in (("/x", "POST", 404), ("/x", "GET", 404), ("/predict", "GET", 405)):
        found = ask(port, None, path, method)
        assert found[0] == status
        assert "POST /predict" in found[1]["error"]


def test_raw_pixels_are_whole_numbers_from_0_to_255(tmp_path: Path) -> None:
    model = lpbnn.build(nn.Linear(4, 3), "mcp")
    raw = torch.randint(0, 256, (3, 4), dtype=torch.uint8)
    path = tmp_path / "model.onnx"
    lpbnn.export_onnx(model, raw, path, prepare=Pixels())
    served = MODULE["Model"](str(path))
    p = lpbnn.predict(model, raw.float() / 255)
    for given in (raw.numpy(), raw.double().numpy(), raw.numpy().astype(np.int64)):
        np.testing.assert_allclose(served.predict(given)["probs"], p.probs.numpy(), atol=1e-5)
    for wrong in ([[0, 1, 2, 256]], [[0, 1, 2, -1]], [[0, 1, 2, 0.5]]):
        with pytest.raises(MODULE["Refused"], match="0 to 255"):
            served.predict(np.asarray(wrong))
