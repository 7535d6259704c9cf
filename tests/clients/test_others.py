"""OpenAI's Node client, langchain-openai, litellm, the llm command, schemathesis, locust."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import httpx
import pytest

BIN = pathlib.Path(sys.executable).parent


NODE = pathlib.Path(os.environ.get("MINISGL_NODE_MODULES", BIN.parent / "node_modules"))


@pytest.mark.skipif(
    not (NODE / "openai").is_dir(), reason="npm install --prefix .venv/clients openai was not run"
)
def test_openai_for_node(url, tmp_path):
    script = tmp_path / "client.mjs"
    script.write_text((pathlib.Path(__file__).parent / "openai_node.mjs").read_text())
    (tmp_path / "node_modules").symlink_to(NODE)
    done = subprocess.run(["node", str(script), url], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "ok", done.stderr


def test_langchain(url):
    langchain = pytest.importorskip("langchain_openai")
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        size: int

    model = langchain.ChatOpenAI(model="null", base_url=f"{url}/v1", api_key="secret", max_retries=0)
    assert model.invoke("hello").content == "hello"
    assert "".join(piece.content for piece in model.stream("héllo 🦊")) == "héllo 🦊"
    assert isinstance(model.with_structured_output(City, method="json_schema").invoke("a city"), City)

    def look(at: str) -> str:
        """Look somewhere."""
        return at

    call = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'
    answer = model.bind_tools([look]).invoke(call)
    assert answer.tool_calls[0]["name"] == "look"
    assert answer.tool_calls[0]["args"] == {"at": "sky"}
    assert model.bind_tools([look], tool_choice="look").invoke("x").tool_calls[0]["name"] == "look"


def test_litellm(url, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch prices from the web
    litellm = pytest.importorskip("litellm")
    where = {"model": "openai/null", "api_base": f"{url}/v1", "api_key": "secret"}
    messages = [{"role": "user", "content": "<think>hm</think>yes"}]
    whole = litellm.completion(messages=messages, **where).choices[0].message
    assert (whole.content, whole.reasoning_content) == ("yes", "hm")
    chunks = litellm.completion(messages=messages, stream=True, **where)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "yes"
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "x" * 9000}], **where)


@pytest.mark.skipif(not (BIN / "llm").exists(), reason="the llm command is not installed")
def test_llm_command(url, tmp_path):
    model = f"- model_id: mine\n  model_name: 'null'\n  api_base: {url}/v1\n  api_key_name: mine\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model)
    env = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "secret"}
    command = [str(BIN / "llm"), "-m", "mine", "--key", "secret"]
    for extra in ([], ["--no-stream"]):
        done = subprocess.run(
            [*command, *extra, "hello there"], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.strip() == "hello there", done.stderr


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not (BIN / "schemathesis").exists(), reason="schemathesis is not installed")
def test_schemathesis_finds_no_5xx(url, tmp_path):
    """Thousands of generated requests against the published schema. /abort would end the others and is left out."""
    examples = os.environ.get("MINISGL_SCHEMATHESIS_EXAMPLES", "100")
    command = [str(BIN / "schemathesis"), "run", f"{url}/openapi.json", "--checks", "not_a_server_error"]
    command += ["--max-examples", examples, "--exclude-path", "/abort", "-H", "Authorization: Bearer secret"]
    command += ["--suppress-health-check", "all", "--request-timeout", "20", "--no-color", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1700)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    count = re.search(r"(\d+) generated", done.stdout)
    assert count is not None and int(count[1]) >= 2000
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.skipif(not (BIN / "locust").exists(), reason="locust is not installed")
def test_locust_smoke(url, tmp_path):
    (tmp_path / "users.py").write_text(
        "from locust import HttpUser, task, between\n"
        "class Talker(HttpUser):\n"
        "    wait_time = between(0.01, 0.05)\n"
        "    @task\n"
        "    def chat(self):\n"
        "        body = {'messages': [{'role': 'user', 'content': 'hello'}]}\n"
        "        head = {'Authorization': 'Bearer secret'}\n"
        "        with self.client.post('/v1/chat/completions', json=body, headers=head, catch_response=True) as answer:\n"
        "            if answer.json()['choices'][0]['message']['content'] != 'hello':\n"
        "                answer.failure('wrong text')\n"
    )
    command = [
        str(BIN / "locust"),
        "-f",
        "users.py",
        "--headless",
        "-u",
        "20",
        "-r",
        "20",
        "-t",
        "5s",
        "-H",
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
