"""Where `load_model` finds a model: folders, the Hub, packages that carry a GGUF file."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfkv.cli import models, packaged

DISTRIBUTION = "tiny-llama-gguf"
HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD, VOCABULARY = 32, 2, 4, 2, 64, 261


def byte_tokens() -> list[str]:
    """The 256 tokens of a byte-level vocabulary, spelled as GPT-2 does."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def write_gguf(path: Path) -> None:
    """A random llama with a byte-level tokenizer, as llama.cpp writes it."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", *byte_tokens(), "ab", "cd"])
    writer.add_token_merges(["a b", "c d"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, generator.normal(0, 0.2, shape).astype(np.float32))

    add("token_embd.weight", VOCABULARY, HIDDEN)
    add("output.weight", VOCABULARY, HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        head_dim = HIDDEN // HEADS
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", KV_HEADS * head_dim, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", KV_HEADS * head_dim, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_distribution(folder: Path, name: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> None:
    """What pip leaves of a distribution: its files and the metadata that lists them."""
    package = name.replace("-", "_")
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / package).mkdir()
    for file, content in files.items():
        (folder / package / file).write_bytes(content)
    # the package itself cannot be imported, like one whose dependencies are not installed
    (folder / package / "__init__.py").write_text("raise ImportError('this package is not to be imported')\n")
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {text}" for text in requires)]
    (metadata / "METADATA").write_text("\n".join(lines) + "\n")
    (metadata / "RECORD").write_text("".join(f"{package}/{file},,\n" for file in (*files, "__init__.py")))


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q.gguf"
    write_gguf(path)
    return path.read_bytes()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return packaged.cache_folder()


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def tiny(distribution: str = DISTRIBUTION) -> packaged.PackagedModel:
    return packaged.PackagedModel(
        name="tiny", distribution=distribution, hub="nobody/tiny", install=f"pip install {distribution}"
    )


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_converted_model_is_the_one_in_the_file(gguf_bytes, site, cache):
    add_distribution(site, DISTRIBUTION, {"tiny.Q.gguf": gguf_bytes})
    said = []
    folder = packaged.converted(tiny(), said.append)
    assert folder == cache / f"{DISTRIBUTION}-1.0"
    assert len(said) == 1
    source = {"pretrained_model_name_or_path": site / "tiny_llama_gguf", "gguf_file": "tiny.Q.gguf"}
    expected = AutoModelForCausalLM.from_pretrained(**source)
    actual = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(actual(ids).logits, expected(ids).logits, rtol=0, atol=0)
    # the file can also be named, and is then read as it is
    named, _ = models.load_model(str(source["pretrained_model_name_or_path"]), gguf_file=source["gguf_file"])
    torch.testing.assert_close(named(ids).logits, expected(ids).logits, rtol=0, atol=0)
    # not a model that says the same whatever it holds
    assert expected(ids).logits.std() > 0.1
    text = "ab and a b\n  (x**2)"
    tokenizer, original = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(**source)
    assert tokenizer(text).input_ids == original(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token == "</s>"
    assert actual.generation_config.eos_token_id == 2


def test_model_is_converted_once(gguf_bytes, site, cache):
    add_distribution(site, DISTRIBUTION, {"tiny.Q.gguf": gguf_bytes})
    folder = packaged.converted(tiny())
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    (site / "tiny_llama_gguf" / "tiny.Q.gguf").unlink()
    assert packaged.converted(tiny()) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert list(cache.iterdir()) == [folder]


def test_file_that_is_split_over_distributions_is_joined(gguf_bytes, site, cache):
    add_distribution(site, DISTRIBUTION, {"tiny.Q.gguf": gguf_bytes})
    whole = packaged.converted(tiny())
    cut = len(gguf_bytes) // 3
    pieces = [gguf_bytes[:cut], gguf_bytes[cut : 2 * cut], gguf_bytes[2 * cut :]]
    parts = tuple(f"split-gguf-part{number}" for number in (1, 2, 3))
    add_distribution(site, "split-gguf", {"LICENSE": b""}, requires=(*(f"{part}==1.0" for part in parts), "numpy"))
    for number, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
        add_distribution(site, part, {f"tiny.gguf.part{number:02}": piece})
    joined = packaged.converted(tiny("split-gguf"))
    assert files_of(joined)["model.safetensors"] == files_of(whole)["model.safetensors"]
    assert {path.name for path in cache.iterdir()} == {whole.name, joined.name}


def test_failed_conversion_leaves_nothing(gguf_bytes, site, cache):
    add_distribution(site, DISTRIBUTION, {"tiny.Q.gguf": gguf_bytes[: len(gguf_bytes) // 2]})
    with pytest.raises(ValueError, match=r"cannot reshape|buffer"):
        packaged.converted(tiny())
    assert list(cache.iterdir()) == []


def test_conversions_at_the_same_time_end_in_one_folder(gguf_bytes, site, cache):
    add_distribution(site, DISTRIBUTION, {"tiny.Q.gguf": gguf_bytes})
    code = (
        "import sys; from hfkv.cli import packaged;"
        f"print(packaged.converted(packaged.PackagedModel('tiny', {DISTRIBUTION!r}, 'nobody/tiny', '')))"
    )
    variables = os.environ | {"PYTHONPATH": str(site)}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs == [str(cache / f"{DISTRIBUTION}-1.0")] * 2
    assert len(list(cache.iterdir())) == 1


def test_package_without_a_gguf_file_is_reported(site, cache):
    add_distribution(site, DISTRIBUTION, {"README": b""})
    with pytest.raises(OSError, match=f"no GGUF file in {DISTRIBUTION}.*pip install {DISTRIBUTION}"):
        packaged.converted(tiny())


def test_missing_package_names_the_fix(cache):
    with pytest.raises(
        ImportError, match=r"no-such-model-gguf, which is not installed.*pip install no-such-model-gguf"
    ):
        packaged.converted(tiny("no-such-model-gguf"))


def test_missing_reader_names_the_fix(gguf_bytes, site, cache):
    add_distribution(site, DISTRIBUTION, {"tiny.Q.gguf": gguf_bytes})
    code = (
        "import sys\n"
        "sys.path = [path for path in sys.path if not path.endswith('site-packages')] + [sys.argv[1]]\n"
        "from hfkv.cli import packaged\n"
        f"packaged.converted(packaged.PackagedModel('tiny', {DISTRIBUTION!r}, 'nobody/tiny', ''))\n"
    )
    (packages,) = {path for path in sys.path if path.endswith("site-packages")}
    linked = site / "linked"
    linked.mkdir()
    for entry in Path(packages).iterdir():
        if not entry.name.startswith(("gguf", "accelerate")):
            (linked / entry.name).symlink_to(entry)
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(Path(models.__file__).parents[2])])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(linked)], env=variables, capture_output=True, text=True, timeout=120
    )
    assert "needs gguf and accelerate (not installed). Fix: pip install gguf accelerate" in done.stderr


def test_cache_folder_that_cannot_be_written_names_the_fix(gguf_bytes, site, tmp_path, monkeypatch):
    add_distribution(site, DISTRIBUTION, {"tiny.Q.gguf": gguf_bytes})
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder is needed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(OSError, match="XDG_CACHE_HOME"):
        packaged.converted(tiny())


FIND = """
import json, sys, time
from hfkv.cli import models
started = time.monotonic()
try:
    source = models.find(sys.argv[1])
    found = {"path": source.path, "packaged": source.packaged and source.packaged.name, "online": source.online}
except OSError as error:
    found = {"error": str(error)}
print(json.dumps(found | {"seconds": time.monotonic() - started}))
"""


def find(name: str, tmp_path: Path, **variables: str) -> dict:
    """What `find` decides in a process of its own: the Hub's settings are read when it is imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", FIND, name],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def hub(model_folder, tmp_path):
    """A server that answers as the Hub does for one repository, and with 404 for others; notes what is downloaded."""
    commit = "a" * 40
    content = tmp_path / "repository"
    shutil.copytree(model_folder, content)
    # the same weights for another program, as many repositories have them
    (content / "onnx").mkdir()
    (content / "onnx" / "model.safetensors").write_bytes(b"not for us")
    (content / "README.md").write_text("# the model")
    files = {path.relative_to(content).as_posix(): path for path in content.rglob("*") if path.is_file()}
    siblings = [{"rfilename": name} for name in files]
    about = {"id": models.DEFAULT, "modelId": models.DEFAULT, "sha": commit, "siblings": siblings, "private": False}

    tree = [
        {"type": "file", "path": name, "size": path.stat().st_size, "oid": hashlib.sha1(path.read_bytes()).hexdigest()}
        for name, path in files.items()
    ]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.wfile.write(self.answer())

        def answer(self) -> bytes:
            """Send the headers; return the body."""
            path = self.path.partition("?")[0]
            name = re.sub(rf"^/{models.DEFAULT}/resolve/(main|{commit})/", "", path)
            status, kind, body, headers = 404, "application/json", b"{}", {"X-Error-Code": "RepoNotFound"}
            if path.startswith(f"/api/models/{models.DEFAULT}/tree/"):
                status, body, headers = 200, json.dumps(tree).encode(), {}
            elif path.startswith(f"/api/models/{models.DEFAULT}"):
                status, body, headers = 200, json.dumps(about).encode(), {}
            elif name in files:
                status, kind, body = 200, "application/octet-stream", files[name].read_bytes()
                headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": commit}
                if self.command == "GET":
                    server.downloads.append(name)
            elif path.startswith(f"/{models.DEFAULT}/"):
                headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            self.send_response(status)
            for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            return body

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.downloads = []
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_hub_that_answers_is_used(hub, tmp_path):
    found = find(models.DEFAULT, tmp_path, HF_ENDPOINT=hub.url)
    assert (found["path"], found["packaged"], found["online"]) == (models.DEFAULT, None, True)


def test_download_brings_what_loading_needs_and_no_more(hub, tmp_path, model_folder):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "no_proxy": "127.0.0.1"}
    script = "from hfkv.cli import models; models.download(models.find(models.DEFAULT))"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    downloaded = list(hub.downloads)
    assert sorted(downloaded) == sorted(path.name for path in model_folder.iterdir())
    script = (
        "from hfkv.cli import models; model, tokenizer = models.load_model(models.DEFAULT);"
        "print(repr(float(model.lm_head.weight.detach().sum())), tokenizer('a b').input_ids)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = AutoModelForCausalLM.from_pretrained(model_folder).lm_head.weight.detach().sum()
    ids = AutoTokenizer.from_pretrained(model_folder)("a b").input_ids
    assert done.stdout == f"{float(expected)!r} {ids}\n"
    # loading found all that it needs
    assert hub.downloads == downloaded


def test_offline_mode_uses_the_package(hub, tmp_path):
    found = find(models.DEFAULT, tmp_path, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert (found["packaged"], found["online"]) == ("smollm2", False)


def test_hub_that_never_answers_is_given_up_within_seconds(tmp_path):
    with socket.socket() as silent:
        # connections are accepted by the system, and nothing is ever sent
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        found = find(models.DEFAULT, tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert found["packaged"] == "smollm2"
    assert found["seconds"] < 4 * models.HUB_TIMEOUT


def test_model_in_the_hubs_cache_serves_offline(tmp_path):
    snapshot = tmp_path / "hf" / "hub" / f"models--{models.DEFAULT.replace('/', '--')}" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    found = find(models.DEFAULT, tmp_path, HF_HUB_OFFLINE="1")
    assert (found["path"], found["packaged"], found["online"]) == (models.DEFAULT, None, False)


def test_packages_name_never_asks_the_hub(tmp_path):
    assert find("gemma3-270m", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")["packaged"] == "gemma3-270m"


def test_folder_never_asks_the_hub(tmp_path):
    (tmp_path / "mine").mkdir()
    found = find("mine", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert (found["path"], found["packaged"], found["online"]) == ("mine", None, False)


@pytest.mark.parametrize("name", ["nobody/nothing", "./no-such-folder"])
def test_unknown_model_says_what_can_be_named(name, hub, tmp_path):
    found = find(name, tmp_path, HF_ENDPOINT=hub.url)
    assert repr(name) in found["error"]
    assert "'smollm2'" in found["error"]
