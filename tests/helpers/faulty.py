"""A stand-in for a capture server, only to make it fail as real ones do: it answers /generate with
states that follow from the token ids alone.

`fault(n)` says what happens to the n-th capture request: "" (served), an HTTP status, "hang" (no
answer until `close`), "cut" (hangs up in mid-answer),
"enospc" (the spool's disk is full), "torn" (half a file), "short" (a row is missing), "nan",
"other" (rows of other ids), "late" (the file comes a little after),
"lacks" (a boundary is not in the file), "nothing" (the answer names no file).
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import save_file


def states_of(ids: list[int], b: int, hidden: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(
        sum((i + 1) * (n + 1) for n, i in enumerate(ids)) * 100 + b
    )
    return torch.randn(len(ids), hidden, generator=generator).bfloat16()


class FaultyServer:
    def __init__(self, target, boundaries, spool: Path, fault=lambda n: "", port: int = 0):
        self.target, self.boundaries, self.spool, self.fault = (
            target,
            boundaries,
            Path(spool),
            fault,
        )
        self.spool.mkdir(parents=True, exist_ok=True)
        self.served, self.failures, self.closing = 0, {}, threading.Event()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.answer(200, outer.info())

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.served += 1
                    number = outer.served
                fault = outer.fault(number)
                if fault == "hang":
                    outer.closing.wait(60)
                    self.close_connection = True
                elif isinstance(fault, int):
                    self.answer(fault, {"error": "as asked"})
                elif fault == "cut":
                    self.send_response(200)
                    self.send_header("Content-Length", "1000")
                    self.end_headers()
                    self.wfile.write(b'{"meta_info": ')
                    self.close_connection = True
                else:
                    name = request["sampling_params"]["custom_params"]["eyas_capture"]
                    self.answer(
                        200,
                        {
                            "meta_info": {
                                "eyas_capture": [outer.write(name, request["input_ids"], fault)]
                            }
                        },
                    )

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_):  # a client that was killed
                pass

        self.http = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def info(self) -> dict:
        capture = {
            "version": "fake",
            "boundaries": list(self.boundaries),
            "n_blocks": self.target.n_blocks,
            "hidden_size": self.target.hidden_size,
            "spool": str(self.spool),
            "quota": 2**30,
            "queued_bytes": 0,
            "failures": self.failures,
            "captured": self.served,
        }
        return {
            "model_path": str(self.target.folder),
            "version": "0.5.23",
            "device": "cpu",
            "dtype": "bfloat16",
            "context_length": 1032,
            "disable_radix_cache": True,
            "chunked_prefill_size": -1,
            "disable_overlap_schedule": True,
            "cuda_graph_backend_prefill": "disabled",
            "internal_states": [{"eyas_capture": capture}],
        }

    def write(self, name: str, ids: list[int], fault: str) -> dict:
        path = self.spool / f"{name}.safetensors"
        if fault == "enospc":
            self.failures[name] = "OSError: [Errno 28] No space left on device"
            return {"path": str(path)}
        rows = ids[1:] if fault == "short" else ids
        tensors = {"input_ids": torch.tensor(ids if fault != "other" else ids[::-1])}
        tensors |= {
            f"boundary_{b}": states_of(rows, b, self.target.hidden_size) for b in self.boundaries
        }
        if fault == "nothing":
            return {}
        if fault == "lacks":
            del tensors[f"boundary_{self.boundaries[-1]}"]
        if fault == "nan":
            tensors[f"boundary_{self.boundaries[0]}"][0, 0] = float("nan")
        save_file(tensors, self.spool / f"tmp-{name}")
        if fault == "torn":
            with open(self.spool / f"tmp-{name}", "r+b") as file:
                file.truncate(200)
        if fault == "late":
            threading.Timer(0.3, (self.spool / f"tmp-{name}").replace, (path,)).start()
        else:
            (self.spool / f"tmp-{name}").replace(path)
        return {"path": str(path)}

    def close(self):
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()
        time.sleep(0.05)
