"""Loggers whose calls never raise."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import llm_datadist
from llm_datadist._logs import get_logger

SRC = Path(llm_datadist.__file__).parent


class _Raises(logging.Handler):
    def handle(self, record: logging.LogRecord) -> bool:
        raise ValueError("a handler that fails")


def test_a_handler_that_raises_is_no_matter() -> None:
    plain, handler = logging.getLogger("llm_datadist.of_a_test"), _Raises()
    plain.addHandler(handler)
    try:
        with pytest.raises(ValueError):
            plain.warning("x")
        quiet = get_logger("llm_datadist.of_a_test")
        quiet.warning("x")
        quiet.error("x")
        quiet.exception("x")
        quiet.log(logging.CRITICAL, "x")
    finally:
        plain.removeHandler(handler)


def test_records_are_those_of_the_plain_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llm_datadist.of_a_test"):
        get_logger("llm_datadist.of_a_test").info("%d of %s", 3, "x")
        get_logger("llm_datadist.of_a_test").debug("too little")
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == (
        "llm_datadist.of_a_test",
        "INFO",
        "3 of x",
    )


@pytest.mark.parametrize("method", ["debug", "info", "warning", "error", "exception", "critical", "log"])
def test_g20_a_record_names_its_caller(caplog: pytest.LogCaptureFixture, method: str) -> None:
    quiet, level = get_logger("llm_datadist.of_a_test"), [logging.INFO] if method == "log" else []
    with caplog.at_level(logging.DEBUG, "llm_datadist.of_a_test"):
        getattr(quiet, method)(*level, "x", exc_info=False)
    (record,) = caplog.records
    assert (Path(record.pathname), record.funcName) == (
        Path(__file__),
        "test_g20_a_record_names_its_caller",
    ), "not the wrapper"


def test_all_code_of_the_package_logs_so() -> None:
    """The plain logger is only handed to users."""
    plain = [
        str(path.relative_to(SRC))
        for path in sorted(SRC.rglob("*.py"))
        if "testing" not in path.parts and re.search(r"logging\.getLogger\(", path.read_text())
    ]
    assert plain == ["_logs.py", "utils/log.py"]


def test_g15_what_a_peer_has_sent_stays_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    said = "bye\nCRITICAL:root:all is lost\r\x1b[2J\u2028x"
    with caplog.at_level(logging.INFO, "llm_datadist.of_a_test"):
        get_logger("llm_datadist.of_a_test").info("%d: %s, %s, %s", 3, said, ValueError(said), "é")
    (line,) = caplog.records[0].getMessage().splitlines()
    assert line.isprintable()
    assert line.startswith("3: bye\\nCRITICAL") and line.endswith("é")
