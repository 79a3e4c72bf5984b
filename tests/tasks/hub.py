"""A server on this machine that speaks as much of the Hugging Face hub's API as ``datasets`` needs."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 39 + "1"


class Hub:
    """``repos``: name -> {path: bytes}, or an error, (status, X-Error-Code). ``asked``: every request."""

    def __init__(self, repos):
        self.repos, self.asked = repos, []
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_hub = None

    def log_message(self, *_):
        pass

    def do_GET(self):
        hub = self.server_hub
        path = unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        parts = path.strip("/").split("/")
        api = parts[0] == "api"
        if parts[api : api + 1] != ["datasets"]:
            return self.refuse(404, "")
        org, name, *rest = parts[api + 1 :]
        repo = hub.repos.get(f"{org}/{name}", (401, ""))  # the hub does not say which repositories exist
        if isinstance(repo, tuple):
            return self.refuse(*repo)
        if not api and rest[0] == "resolve":
            return self.file(repo, "/".join(rest[2:]))
        what = rest[0] if rest else "revision"
        if what == "revision":
            files = [{"rfilename": file} for file in repo]
            info = {"id": f"{org}/{name}", "sha": COMMIT, "siblings": files, "private": False, "gated": False}
            return self.reply(json.dumps(info).encode())
        if what == "tree":
            folder = "/".join(rest[2:])
            return self.reply(json.dumps(tree(repo, folder)).encode())
        if what == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else []
            return self.reply(json.dumps([e for e in tree(repo, "") if e["path"] in wanted]).encode())
        return self.refuse(404, "EntryNotFound")

    do_HEAD = do_POST = do_GET

    def file(self, repo, path):
        if path not in repo:
            return self.refuse(404, "EntryNotFound")
        data = repo[path]
        return self.reply(data, {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "none"})

    def refuse(self, status, code):
        self.reply(b"{}", {"X-Error-Code": code} if code else {}, status)

    def reply(self, data, headers=None, status=200):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def etag(data):
    return hashlib.sha1(data).hexdigest()


def tree(repo, folder):
    found = [
        {"type": "file", "path": path, "size": len(data), "oid": etag(data)}
        for path, data in repo.items()
        if path.startswith(f"{folder}/" if folder else "")
    ]
    folders = {path.rpartition("/")[0] for path in repo} - {"", folder}
    return found + [{"type": "directory", "path": f, "size": 0, "oid": "d" * 40} for f in sorted(folders)]
