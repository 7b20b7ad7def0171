"""The process that runs a chat template: it reads a line of JSON for each conversation, and answers with one.

A file by itself, which imports nothing of this package, so that the process starts fast. The first line is
{"template": ...}; each further one the variables of a conversation; an answer is {"text": ...} or {"error": ...}.
"""

import json
import resource
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARACTERS = 1 << 22  # of a rendered conversation
_MOST_BYTES = 1 << 30  # of the process's memory
_MOST_FILE_BYTES = 0  # of what it writes to files: it writes to a pipe alone


def environment() -> ImmutableSandboxedEnvironment:
    """The names and rules that published templates are written for (`transformers`' apply_chat_template)."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def rendered(template: Any, variables: dict[str, Any]) -> dict[str, str]:
    """The answer to a conversation."""
    parts, left = [], MOST_CHARACTERS
    try:
        for part in template.generate(variables):
            parts.append(part)
            if (left := left - len(part)) < 0:
                return {"error": f"makes more than {MOST_CHARACTERS:,} characters"}
    except MemoryError:
        return {"error": "needs more memory than it may have"}
    except Exception as e:  # a template fails in any way it likes
        return {"error": str(e) or type(e).__name__}
    return {"text": "".join(parts)}


def main() -> None:
    """Answers until its input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_FILE_BYTES, _MOST_FILE_BYTES))
    template, error = None, {}
    try:
        template = environment().from_string(json.loads(sys.stdin.readline())["template"])
    except Exception as e:
        error = {"error": f"is no template of Jinja2: {e}"}
    for line in sys.stdin:
        print(json.dumps(error or rendered(template, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
