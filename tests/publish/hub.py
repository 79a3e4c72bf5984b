"""A small hub that is pushed to: who one is, repositories, their visibility, LFS, commits, and the check of a card.

Run as ``hub.py FOLDER``; it prints its port. What is pushed lies in FOLDER/org/name, of a branch in
FOLDER/org/name@branch, and is served by models/hub.py.
"""

import base64
import hashlib
import json
import os
import re
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from models import hub

USERS = {"hf_writer": "you", "hf_reader": "guest"}
PRIVATE = {}  # repository -> bool
NAME = re.compile(r"[\w.-]+/[\w.-]+")
LICENSES = ("mit", "apache-2.0", "other", "llama3.2")


def wrong_in(card):
    """What the hub would not take of a card's metadata."""
    about = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", card, re.S)[1])
    wrong = [] if about.get("license", "mit") in LICENSES else ["license"]
    wrong += ["base_model"] if "base_model" in about and not NAME.fullmatch(about["base_model"]) else []
    wrong += (
        ["base_model_relation"] if about.get("base_model_relation", "adapter") not in ("adapter", "finetune") else []
    )
    wrong += ["tags"] if not all(isinstance(tag, str) for tag in about["tags"]) else []
    wrong += ["datasets"] if not all(NAME.fullmatch(name) for name in about.get("datasets", [])) else []
    for model in about.get("model-index", []):
        for result in model["results"]:
            fits = result["task"]["type"] and result["dataset"]["type"] and result["dataset"]["name"]
            numbers = all(isinstance(m["value"], float) and m["type"] for m in result["metrics"])
            wrong += [] if fits and numbers else ["model-index"]
    return wrong


class Handler(hub.Handler):
    @property
    def user(self):
        return USERS.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))

    def json(self, value, status=200, **headers):
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def do_GET(self):
        path = self.path.partition("?")[0].strip("/")
        if path == "stop":
            self.answer(200)
            threading.Timer(0.1, os._exit, [0]).start()
        elif path == "api/whoami-v2":
            user = self.user
            self.json({"name": user, "type": "user"} if user else {"error": "Invalid"}, 200 if user else 401)
        else:
            name = "/".join(path.removeprefix("api/models/").split("/")[:2])
            if PRIVATE.get(name) and self.user != "you":
                self.answer(401, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            elif path == f"api/models/{name}" and name in PRIVATE:
                folder = hub.ROOT / name
                files = [{"rfilename": p.name} for p in folder.iterdir()] + [{"rfilename": ".gitattributes"}]
                self.json({"id": name, "sha": hub.COMMIT, "siblings": files, "private": PRIVATE[name], "tags": []})
            else:
                super().do_GET()

    do_HEAD = do_GET

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_PUT(self):
        data = self.body()
        held = hub.ROOT / ".lfs" / self.path.rpartition("/")[2]
        held.parent.mkdir(exist_ok=True)
        held.write_bytes(data)
        self.answer(200)

    def do_POST(self):
        data, path = self.body(), self.path.partition("?")[0].strip("/")
        if path == "api/validate-yaml":
            wrong = wrong_in(json.loads(data)["content"])
            self.json({"errors": [{"message": text} for text in wrong], "warnings": []}, 400 if wrong else 200)
        elif self.user != "you":
            self.json({"error": "Forbidden"}, 403, X_Error_Message="You have no rights here")
        elif path == "api/repos/create":
            asked = json.loads(data)
            name = f"{asked.get('organization') or 'you'}/{asked['name']}"
            if name in PRIVATE:
                self.json({"error": "You already created this model repo"}, 409)
            elif not name.startswith("you/"):
                self.json({"error": "Forbidden"}, 403)
            else:
                PRIVATE[name] = asked["private"] if "private" in asked else asked["visibility"] == "private"
                (hub.ROOT / name).mkdir(parents=True)
                self.json({"url": f"http://{self.headers['Host']}/{name}", "name": name})
        elif "/preupload/" in path:
            files = json.loads(data)["files"]
            modes = [{"path": f["path"], "uploadMode": "lfs" if f["size"] > 10**5 else "regular"} for f in files]
            self.json({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        elif path.endswith("/info/lfs/objects/batch"):
            here = f"http://{self.headers['Host']}/lfs"
            held = json.loads(data)["objects"]
            actions = [{**o, "actions": {"upload": {"href": f"{here}/{o['oid']}"}}} for o in held]
            self.json({"transfer": "basic", "objects": actions})
        elif "/branch/" in path:
            self.answer(201)
        elif "/commit/" in path:
            self.commit(path, [json.loads(line) for line in data.splitlines()])
        else:
            self.answer(404)

    def commit(self, path, lines):
        name, _, branch = path.removeprefix("api/models/").partition("/commit/")
        folder = hub.ROOT / (name if branch == "main" else f"{name}@{branch}")
        folder.mkdir(exist_ok=True)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                content = (hub.ROOT / ".lfs" / value["oid"]).read_bytes()
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                (folder / value["path"]).write_bytes(content)
        url = f"http://{self.headers['Host']}/{name}/commit/{hub.COMMIT}"
        self.json({"success": True, "commitUrl": url, "commitOid": hub.COMMIT, "hookOutput": ""})


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
