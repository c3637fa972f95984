"""The doctor's checks fail where something is wrong, and say what to do."""

import http.server
import threading

import pytest

from tasks import doctor


def test_a_healthy_machine(tmp_path):
    found = {check.name: check for check in doctor.checks(tmp_path / "state", tmp_path / "models")}
    assert list(found) == [
        "python", "compiler", "disk for results", "disk for models", "memory", "noise",
        "models", "server", "confinement",
    ]  # fmt: skip
    assert all(check.ok for check in found.values() if check.needed)
    assert all(check.ok == (not check.remedy) for check in found.values())
    assert not (tmp_path / "state").exists()


def test_no_compiler_and_a_broken_one(tmp_path, monkeypatch):
    assert not doctor.compiler("no-such-compiler").ok
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'fatal error: cc1plus missing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = doctor.compiler()
    assert not check.ok
    assert "cc1plus" in check.detail
    assert "apt-get install g++" in check.remedy


def test_disk(tmp_path):
    assert not doctor.disk(tmp_path, needed_gib=1e9).ok
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in doctor.disk(file).detail
    assert doctor.disk(tmp_path / "not" / "yet", needed_gib=0).ok


def test_memory():
    assert not doctor.memory(1e6).ok


def test_models(tmp_path):
    assert "none yet" in doctor.model_cache(tmp_path / "models").detail
    folder = tmp_path / "smollm2"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert not doctor.model_cache(tmp_path).ok
    (folder / "model.safetensors").write_text("")
    assert doctor.model_cache(tmp_path).ok


class Answer(http.server.BaseHTTPRequestHandler):
    body = b"true"

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body if self.path == "/api/health" else b"")

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(("body", "ok"), [(b"true", True), (b"<html>", False)])
def test_server(body, ok):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("A", (Answer,), {"body": body})) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{served.server_port}/api"
        assert doctor.server(url).ok == ok
        served.shutdown()
    gone = doctor.server(url)
    assert not gone.ok
    assert "make serve" in gone.remedy
    assert doctor.server(None).ok


def test_confinement_names_a_level():
    assert any(f"level '{level}'" in doctor.confinement().detail for level in ("process", "sandbox", "full"))
