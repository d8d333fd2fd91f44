"""A Hub on this machine: the routes that pushing and loading a model take, over real HTTP, in a folder.

    python tests/support/hub.py hub --port 8600 &
    export HF_ENDPOINT=http://127.0.0.1:8600 HF_TOKEN=any HF_HUB_DISABLE_XET=1

One branch of a repository is one folder: REPO/BRANCH/files. A commit is published by one rename. `faults` makes the next
requests of a kind fail: {"POST commit": [503, 409]}, or "cut" for a connection that breaks off.
"""

import argparse
import base64
import hashlib
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0, token: str | None = None) -> None:
        self.folder, self.token = folder, token
        self.faults: dict[str, list[Any]] = {}
        self.seen: list[str] = []
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, repo: str, branch: str = "main") -> set[str]:
        root = self.folder / repo / branch
        return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.route("GET")

    def do_HEAD(self) -> None:
        self.route("HEAD")

    def do_POST(self) -> None:
        self.route("POST")

    def do_PUT(self) -> None:
        self.route("PUT")

    def route(self, verb: str) -> None:
        path = unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = ((re.fullmatch(pattern, f"{verb} {path}"), name) for pattern, name in _ROUTES)
        match, name = next((pair for pair in found if pair[0]), (None, ""))
        if match is None:
            self.answer(404, {"error": f"no route {verb} {path}"})
            return
        with self.server.lock:
            kind = f"{verb} {name}"
            self.server.seen.append(kind)
            fault = self.server.faults[kind].pop(0) if self.server.faults.get(kind) else None
        if fault == "cut":
            self.close_connection = True
            self.connection.close()
        elif fault is not None:
            self.answer(fault, {"error": f"told to answer {fault}"})
        elif verb in ("POST", "PUT") and name != "lfs" and self.refused():
            self.answer(401, {"error": "Invalid username or password."})
        else:
            getattr(self, name)(*match.groups())

    def refused(self) -> bool:
        token = self.server.token
        return token is not None and self.headers.get("Authorization") != f"Bearer {token}"

    def answer(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers.setdefault("Content_Type", "application/json")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # -- writing ---------------------------------------------------------------------------------------------------------

    def create(self) -> None:
        asked = json.loads(self.body)
        repo = "/".join(filter(None, (asked.get("organization") or "me", asked["name"])))
        root = self.server.folder / repo
        status = 409 if root.exists() else 200
        (root / "main").mkdir(parents=True, exist_ok=True)
        if status == 200:
            (root / "private").write_text(
                json.dumps(asked.get("visibility") == "private" or bool(asked.get("private")))
            )
        self.answer(status, {"url": f"{self.server.url}/{repo}", "name": repo, "error": "exists"})

    def whoami(self) -> None:
        self.answer(200, {"name": "me", "type": "user", "orgs": [], "auth": {"type": "access_token"}})

    def branch(self, repo: str, name: str) -> None:
        root = self.server.folder / repo
        if (root / name).exists():
            self.answer(409, {"error": "exists"})
        else:
            shutil.copytree(root / "main", root / name)
            self.answer(200, {})

    def yaml(self) -> None:
        self.answer(200, {"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self.answer(200, {"files": files})

    def batch(self, repo: str) -> None:
        objects = []
        for each in json.loads(self.body)["objects"]:
            known = (self.server.folder / "lfs" / each["oid"]).exists()
            actions = {} if known else {"upload": {"href": f"{self.server.url}/lfs/{each['oid']}", "header": {}}}
            objects.append(each | ({"actions": actions} if actions else {}))
        self.answer(200, {"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")

    def lfs(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.answer(400, {"error": "other bytes than announced"})
            return
        path = self.server.folder / "lfs" / oid
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.body)
        self.answer(200)

    def commit(self, repo: str, revision: str) -> None:
        root = self.server.folder / repo
        new = root / f".{revision}.new"
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(root / revision, new)
        for line in self.body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                data = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                data = (self.server.folder / "lfs" / value["oid"]).read_bytes()
            else:
                continue
            (new / value["path"]).parent.mkdir(parents=True, exist_ok=True)
            (new / value["path"]).write_bytes(data)
        shutil.rmtree(root / revision)
        new.rename(root / revision)
        oid = self.revision_id(repo, revision)
        url = f"{self.server.url}/{repo}/commit/{oid}"
        self.answer(200, {"success": True, "commitUrl": url, "commitOid": oid})

    # -- reading ---------------------------------------------------------------------------------------------------------

    def revision_id(self, repo: str, revision: str) -> str:
        root = self.server.folder / repo / revision
        seen = hashlib.sha1(usedforsecurity=False)
        for name in sorted(self.server.files(repo, revision)):
            seen.update(name.encode() + (root / name).read_bytes())
        return seen.hexdigest()

    def branch_of(self, repo: str, revision: str) -> str | None:
        """The branch of a name or of a commit's id."""
        root = self.server.folder / repo
        branches = [path.name for path in root.iterdir() if path.is_dir()] if root.exists() else []
        return next((name for name in branches if revision in (name, self.revision_id(repo, name))), None)

    def info(self, repo: str, revision: str | None = None) -> None:
        branch = self.branch_of(repo, revision or "main")
        if branch is None:
            self.missing("RepoNotFound")
            return
        root = self.server.folder / repo
        siblings = [{"rfilename": name} for name in sorted(self.server.files(repo, branch))]
        private = json.loads((root / "private").read_text())
        sha = self.revision_id(repo, branch)
        self.answer(
            200, {"id": repo, "modelId": repo, "sha": sha, "private": private, "siblings": siblings, "tags": []}
        )

    def tree(self, repo: str, revision: str) -> None:
        branch = self.branch_of(repo, revision)
        if branch is None:
            self.missing("RevisionNotFound")
            return
        root = self.server.folder / repo / branch
        entries = [
            {"type": "file", "path": name, "size": (root / name).stat().st_size, "oid": _digest(root / name)}
            for name in sorted(self.server.files(repo, branch))
        ]
        self.answer(200, entries)

    def resolve(self, repo: str, revision: str, name: str) -> None:
        branch = self.branch_of(repo, revision)
        if branch is None:
            self.missing("RepoNotFound")
            return
        path = self.server.folder / repo / branch / name
        if not path.is_file():
            self.missing("EntryNotFound", X_Repo_Commit=self.revision_id(repo, branch))
            return
        headers = {"ETag": f'"{_digest(path)}"', "X_Repo_Commit": self.revision_id(repo, branch)}
        self.answer(200, path.read_bytes(), Content_Type="application/octet-stream", **headers)

    def missing(self, code: str, **headers: str) -> None:
        self.answer(404, {"error": code}, X_Error_Code=code, **headers)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES = (
    (r"POST /api/repos/create", "create"),
    (r"GET /api/whoami-v2", "whoami"),
    (r"POST /api/validate-yaml", "yaml"),
    (rf"POST /api/models/{_REPO}/branch/([\w.-]+)", "branch"),
    (rf"POST /api/models/{_REPO}/preupload/([\w.-]+)", "preupload"),
    (rf"POST /api/models/{_REPO}/commit/([\w.-]+)", "commit"),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /lfs/(\w+)", "lfs"),
    (rf"GET /api/models/{_REPO}", "info"),
    (rf"GET /api/models/{_REPO}/revision/([\w.-]+)", "info"),
    (rf"GET /api/models/{_REPO}/tree/([\w.-]+)", "tree"),
    (rf"(?:GET|HEAD) /{_REPO}/resolve/([\w.-]+)/(.+)", "resolve"),
)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, help="where the repositories lie")
    made.add_argument("--port", type=int, default=8600)
    options = made.parse_args()
    hub = Hub(options.folder, options.port)
    print(f"A Hub at {hub.url}, in {options.folder}; Ctrl-C ends it", flush=True)
    hub.serve_forever()


if __name__ == "__main__":
    main()
