"""Set-up: which build of torch is installed, and what a command with an extra of its own needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import setup_env  # noqa: E402


@pytest.fixture
def on_linux_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_TORCH_ARGS", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: False)


@pytest.mark.usefixtures("on_linux_without_a_gpu")
@pytest.mark.parametrize("is_reached", [True, False])
def test_without_a_gpu_the_cpu_index_is_used_if_it_is_reached(
    is_reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "can_reach", lambda index: is_reached)
    expected = ["--extra-index-url", setup_env.CPU_INDEX] if is_reached else []
    assert setup_env.torch_arguments() == expected


@pytest.mark.usefixtures("on_linux_without_a_gpu")
def test_nobody_asks_for_an_index_where_it_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: str) -> bool:
        raise AssertionError(f"asked for {index}")

    monkeypatch.setattr(setup_env, "can_reach", refuse)
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: True)
    assert setup_env.torch_arguments() == []
    monkeypatch.setenv("PIP_TORCH_ARGS", "--index-url 'https://example.org/a b'")
    assert setup_env.torch_arguments() == ["--index-url", "https://example.org/a b"]


def test_an_index_that_does_not_answer(tmp_path: Path) -> None:
    assert not setup_env.can_reach(f"file://{tmp_path}")
    assert not setup_env.can_reach("http://127.0.0.1:9")


def test_the_pages_need_neither_torch_nor_the_package() -> None:
    found = setup_env.requirements_of("docs")
    assert {"mkdocs", "mkdocstrings[python]", "ruff"} == {
        name.partition(">")[0].partition("=")[0] for name in found
    }
    with pytest.raises(SystemExit, match="got 'nothing'"):
        setup_env.requirements_of("nothing")
