"""triton_echo.py server FOLDER | client FOLDER BYTES ANSWER_BYTES: Triton with its python backend,
a baseline of the channel bench. Tensors go through Triton's system shared-memory extension, calls
through its gRPC endpoint. Runs in a Python that has nvidia-pytriton, whose wheel brings the server,
and says what is missing elsewhere. The server listens on a port that the kernel chose, written to
FOLDER/triton-port."""

import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(
            "y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy()%s)]) for request in requests]
"""
CONFIG = """
name: "%s"
backend: "python"
max_batch_size: 0
input [{ name: "x", data_type: TYPE_UINT8, dims: [-1] }]
output [{ name: "y", data_type: TYPE_UINT8, dims: [-1] }]
instance_group [{ kind: KIND_CPU, count: 1 }]
"""
READY_SECONDS = 90.0


def tell(why: str) -> None:
    data = why.encode()
    sys.stdout.buffer.write(struct.pack("<Q", len(data)) + data)
    sys.stdout.buffer.flush()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def make_repository(folder: pathlib.Path) -> pathlib.Path:
    repository = folder / "triton-models"
    for name, part in (("echo", ""), ("head", "[:4]")):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(MODEL % part)
        (repository / name / "config.pbtxt").write_text(CONFIG % name)
    return repository


def serve(folder: pathlib.Path) -> None:
    import pytriton
    import tritonclient.grpc as triton

    home = pathlib.Path(pytriton.__file__).parent / "tritonserver"
    backends = folder / "triton-backends"
    shutil.copytree(home / "backends", backends)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(home / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    port = free_port()
    log = open(folder / "triton.log", "wb")
    # The stub's, too.
    libraries = pathlib.Path(pytriton.__file__).parent.parent / "nvidia_pytriton.libs"
    environment = dict(os.environ, PATH=os.path.dirname(sys.executable) + ":" + os.environ["PATH"],
                       LD_LIBRARY_PATH=str(libraries))  # fmt: skip
    server = subprocess.Popen(
        [home / "bin" / "tritonserver", "--model-repository", make_repository(folder), "--backend-directory", backends,
         "--grpc-address", "127.0.0.1", "--grpc-port", str(port), "--allow-http=false", "--allow-metrics=false",
         "--backend-config=python,shm-default-byte-size=1048576"],
        stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=False)  # fmt: skip

    def stop(*_: object) -> None:
        server.terminate()
        server.wait()
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    until = time.monotonic() + READY_SECONDS
    while server.poll() is None:
        try:
            if client.is_model_ready("echo") and client.is_model_ready("head"):
                break
        except Exception:
            pass
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    else:
        lines = (folder / "triton.log").read_text(errors="replace").strip().splitlines()
        return tell("tritonserver ended: " + (lines[-1] if lines else "without a word"))
    client.close()
    (folder / "triton-port").write_text(str(port))
    tell("")
    while sys.stdin.buffer.read(8):
        pass
    stop()


def ask(folder: pathlib.Path, size: int, answer: int) -> None:
    import numpy
    import tritonclient.grpc as triton
    import tritonclient.utils.shared_memory as shared
    from rounds import serve_rounds

    client = triton.InferenceServerClient("127.0.0.1:" + (folder / "triton-port").read_text())
    names = {kind: f"bench_{os.getpid()}_{kind}" for kind in "xy"}
    regions = {}
    try:
        for kind, length in (("x", size), ("y", answer)):
            regions[kind] = shared.create_shared_memory_region(names[kind], "/" + names[kind], length)
            client.register_system_shared_memory(names[kind], "/" + names[kind], length)
        shared.set_shared_memory_region(regions["x"], [numpy.ones(size, numpy.uint8)])
        shared.set_shared_memory_region(regions["y"], [numpy.zeros(answer, numpy.uint8)])
        x = triton.InferInput("x", [size], "UINT8")
        x.set_shared_memory(names["x"], size)
        y = triton.InferRequestedOutput("y")
        y.set_shared_memory(names["y"], answer)
        model = "echo" if answer == size else "head"

        def request() -> None:
            client.infer(model, [x], outputs=[y])
            if shared.get_contents_as_numpy(regions["y"], numpy.uint8, [answer])[-1] != 1:
                raise ValueError("a wrong answer")

        serve_rounds(3, request)
    finally:
        for kind, region in regions.items():
            client.unregister_system_shared_memory(names[kind])
            shared.destroy_shared_memory_region(region)


if __name__ == "__main__":
    try:
        role, where = sys.argv[1], pathlib.Path(sys.argv[2])
        serve(where) if role == "server" else ask(where, int(sys.argv[3]), int(sys.argv[4]))
    except ImportError as error:
        tell(str(error))
