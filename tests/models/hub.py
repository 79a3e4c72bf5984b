"""A small hub: enough of the API of huggingface.co for a model to be fetched from a folder, or refused.

Run as ``hub.py FOLDER``; it prints its port. Repositories are FOLDER/org/name; org decides what is answered.
"""

import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(sys.argv[1])
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {  # what the hub answers: status, X-Error-Code, X-Error-Message
    "missing": (404, "RepoNotFound", "Repository not found"),
    "gated": (403, "GatedRepo", "Access to this repository is restricted"),
    "unknown": (401, "RepoNotFound", "Repository not found"),
    "badtoken": (401, "", "Invalid credentials in Authorization header"),
    "down": (503, "", "Service unavailable"),
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        parts = self.path.partition("?")[0].strip("/").split("/")
        parts = parts[2:] if parts[:2] == ["api", "models"] else parts
        org = parts[0]
        if org in REFUSALS:
            status, code, message = REFUSALS[org]
            self.answer(status, b"{}", X_Error_Code=code, X_Error_Message=message)
            return
        repository, rest = ROOT / "/".join(parts[:2]), parts[2:]
        if not repository.is_dir():
            self.answer(404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif rest[:1] == ["resolve"]:
            if rest[1] not in ("main", COMMIT):
                self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
                return
            file = repository / "/".join(rest[2:])
            if file.is_file():
                body = file.read_bytes()
                self.answer(200, body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', X_Repo_Commit=COMMIT)
            else:
                self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", X_Repo_Commit=COMMIT)
        elif rest[:1] == ["tree"]:
            files = [p for p in repository.rglob("*") if p.is_file()]
            rows = [
                {"type": "file", "path": p.relative_to(repository).as_posix(), "size": p.stat().st_size, "oid": "0"}
                for p in files
            ]
            self.answer(200, json.dumps(rows).encode(), Content_Type="application/json")
        else:
            names = [{"rfilename": p.relative_to(repository).as_posix()} for p in repository.rglob("*") if p.is_file()]
            about = {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": names, "tags": [], "private": False}
            self.answer(200, json.dumps(about).encode(), Content_Type="application/json")

    do_HEAD = do_GET


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
