"""Rewrites CUDA sources so that g++ can compile their kernels as functions of the CPU.

The sources may be ordinary CUDA. What g++ cannot read is rewritten in a copy; line numbers stay:
  kernel<T><<<grid, block, shared, stream>>>(args)
                                    CU_LAUNCH((kernel<T>), grid, block, shared, stream, args)
  extern __shared__ float buffer[]; CU_DYN_SHARED(float, buffer);
  namespace {                       a named inline namespace, so that kernels have symbols
  static __global__                 __global__, for the same reason
The kernels register themselves when the library made of the copies is loaded: see cuda_sim_build.
"""

from __future__ import annotations

import re
from pathlib import Path

CLOSERS = {"(": ")", "[": "]", "{": "}"}


def split_top_level(text: str) -> list[str]:
    """Splits at the commas outside all brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return parts


def matching(text: str, start: int) -> int:
    """The position of the bracket that closes the one at start."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] in CLOSERS:
            depth += 1
        elif text[i] in CLOSERS.values():
            depth -= 1
            if depth == 0:
                return i
    raise ValueError(f"expected balanced brackets, got {text[start : start + 60]!r}")


def kernel_expression_start(text: str, end: int) -> int:
    """Where the expression that ends at `end` begins: a name, maybe with template arguments."""
    i = end
    while i > 0 and text[i - 1].isspace():
        i -= 1
    if i > 0 and text[i - 1] == ">":
        depth = 0
        while i > 0:
            i -= 1
            depth += {">": 1, "<": -1}.get(text[i], 0)
            if depth == 0:
                break
    while i > 0 and (text[i - 1].isalnum() or text[i - 1] in "_:"):
        i -= 1
    return i


def rewrite_launches(text: str) -> str:
    """Makes macro calls of all <<<...>>> launches."""
    while "<<<" in text:
        open_at = text.index("<<<")
        close_at = text.index(">>>", open_at)
        start = kernel_expression_start(text, open_at)
        args_open = text.index("(", close_at)
        args_close = matching(text, args_open)
        kernel = text[start:open_at].strip()
        config = split_top_level(text[open_at + 3 : close_at])
        config += ["0"] * (4 - len(config))
        args = text[args_open + 1 : args_close].strip()
        # Commas in template arguments and initialisers may not split a macro's arguments.
        parts = [f"({kernel})", *(f"({c})" for c in config[:3]), f"(cudaStream_t)({config[3]})"]
        call = ", ".join(parts + ([args] if args else []))
        lines = text.count("\n", start, args_close) - call.count("\n")
        text = text[:start] + f"CU_LAUNCH({call})" + "\n" * lines + text[args_close + 1 :]
    return text


def without_comments(text: str) -> str:
    """Blanks comments, keeping line numbers, so that their contents are never rewritten."""
    literal = r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    pattern = re.compile(rf"//[^\n]*|/\*.*?\*/|({literal})", re.DOTALL)
    return pattern.sub(lambda m: m.group(1) or re.sub(r"[^\n]", " ", m.group(0)), text)


def rewrite(text: str, main_file: str) -> str:
    """The text that g++ gets for a CUDA source or a header of it."""
    text = without_comments(text)
    # nvcc mangles an unnamed namespace with the main file's name; the runtime maps it to this one.
    unnamed = "cuemu_anonymous_" + re.sub(r"\W", "_", main_file)
    text = re.sub(r"\bnamespace\s*\{", f"inline namespace {unnamed} {{", text)
    text = re.sub(r"\bstatic\s+__global__", "__global__", text)
    align = r"(?:__align__\s*\([^)]*\)\s*)?"
    shared = rf"extern\s+__shared__\s+{align}([\w:<>\s]+?)\s+(\w+)\s*\[\s*\]\s*;"
    text = re.sub(shared, r"CU_DYN_SHARED(\1, \2);", text)
    return rewrite_launches(text)


def write_rewritten(source: Path, folder: Path, main_file: Path | None = None) -> Path:
    """Writes the copy of a source, and those of the headers beside it that it includes.

    Returns:
        the copy of `source`, in `folder`.
    """
    text = source.read_text()
    target = folder / source.name
    prologue = ""
    if main_file is None:
        target = folder / f"{source.name}.cpp"
        # cuemu.h makes macros of names such as blockDim: the headers of libraries come first.
        system = re.findall(r"^\s*#\s*include\s*<[^>]+>", text, re.MULTILINE)
        prologue = "\n".join([*system, '#include "cuemu.h"', ""])
    main_file = main_file or source
    folder.mkdir(parents=True, exist_ok=True)
    body = rewrite(text, main_file.name)
    target.write_text(f'{prologue}#line 1 "{source.resolve()}"\n{body}')
    for header in re.findall(r'^\s*#\s*include\s*"([^"/]+)"', text, re.MULTILINE):
        path = source.parent / header
        if header != "cuemu.h" and path.exists():
            write_rewritten(path, folder, main_file)
    return target
