"""Problems in the reader's language: English messages of the program as Chinese sentences. Used by page_context.py.

Errors come from every room and are written in English. Those a page meets are known here by their pattern; for any
other one the page shows in Chinese that the value is wrong, and the English text folded below.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from erniekit.config.flat import KEYS
from erniekit.printable import public
from erniekit.webui.translations import help_of, label_of

_NUMBER = r"(?:, (?P<low>[-\w.]+) or more)?(?:,? (?:and )?(?P<high>[-\w.]+) or less)?"
# English pattern -> Chinese sentence; names in braces are the pattern's groups.
_PROBLEMS: tuple[tuple[str, str], ...] = (
    (r"(?P<key>\w+) must be given", "必须填写"),
    (r"unknown key '(?P<key>.+?)'.*", "没有名为 {key} 的参数"),
    (r"(?P<key>\w+) cannot be set from the page", "不能在页面上设置"),
    (r"(?P<key>\w+) leads outside the folders of this page: (?P<path>.*)", "路径在本页面的目录之外：{path}"),
    (r"(?P<key>\w+) holds a link that leads outside .*?: (?P<path>.*)", "其中的链接指向本页面的目录之外：{path}"),
    (
        r"the adapter in (?P<key>\w+) is of a model outside .*?: (?P<path>.*)",
        "该 LoRA 的基座模型在本页面的目录之外：{path}",
    ),
    (r"(?P<key>\w+) does not exist: (?P<path>.*)", "不存在：{path}"),
    (r"(?P<key>\w+) is an address: (?P<path>.*)", "是网络地址：{path}；页面只读取其目录中的文件"),
    (r"(?P<key>\w+) is empty", "不能为空"),
    (r"(?P<key>\w+) holds a control character", "含有控制字符"),
    (r"(?P<key>\w+) is (?P<value>.*); the page allows (?P<most>.*)", "为 {value}；页面最多允许 {most}"),
    (rf"(?P<key>\w+) is (?P<value>.*); expected a whole number{_NUMBER}", "为 {value}；应为整数"),
    (rf"(?P<key>\w+) is (?P<value>.*); expected a number{_NUMBER}.*", "为 {value}；应为数字"),
    (r"(?P<key>\w+) is (?P<value>.*); expected True or False", "为 {value}；应为 True 或 False"),
    (r"(?P<key>\w+) is (?P<value>.*); expected one of (?P<choices>.*)", "为 {value}；可选：{choices}"),
    (r"(?P<key>\w+) is (?P<value>.*); expected a list, each one of (?P<choices>.*)", "为 {value}；可选：{choices}"),
    (r"(?P<key>load_best_model_at_end) is True, but nothing is evaluated.*", "已开启，但训练中没有评估"),
    (r"output_dir is neither empty nor a run: .*", "输出目录既不是空目录，也不是一次运行的目录"),
    (r"job (?P<job>\S+) is training into the same folder", "任务 {job} 正在训练到同一目录"),
    (r"output_dir lies in the folder of job (?P<job>\S+)", "输出目录位于任务 {job} 的目录中"),
    (r"(?P<count>\d+) jobs are running", "已有 {count} 个任务在运行"),
    (r"this (?:job|run) is still running", "任务仍在运行"),
    (r"there is no such job", "没有这个任务"),
    (r"the job's folder holds .*", "任务目录中有不是任务写入的文件"),
    (r"the job could not be started: .*", "任务无法启动"),
    (r"the name is (?P<count>\d+) characters long", "名称有 {count} 个字符，太长"),
    (r"this file was not uploaded", "该文件没有上传"),
    (r"(?P<name>.*) is not a file of this kind", "{name} 不是支持的文件类型"),
    (r"the file has (?P<size>[\d,]+) bytes", "文件有 {size} 字节，太大"),
    (r"the file is too large for a message", "文件太大，无法随消息发送"),
    (r"the folder of uploads is full", "上传目录已满"),
    (r"no answer within (?P<seconds>\d+) s", "{seconds} 秒内没有结果"),
    (r"the recipe is not UTF-8", "配置文件不是 UTF-8 编码"),
    (r"the recipe has more than (?P<count>[\d,]+) characters", "配置文件超过 {count} 个字符"),
    (r"the server does not answer: .*", "模型服务没有响应，请重新加载模型"),
    (r"the answer was interrupted", "回答中断，请重新加载模型"),
)
_FIXES: tuple[tuple[str, str], ...] = (
    (r"at most (?P<most>.*)", "最多 {most}"),
    (r"did you mean (?P<name>.*)\?", "是否想填 {name}？"),
    (
        r"use a path inside (?P<folders>.*), or start the page with .*",
        "请用 {folders} 中的路径，或以 root=DIR,DIR 启动页面",
    ),
    (r"choose one of the list, or check the path", "请从列表中选择，或检查路径"),
    (
        r"download it into a folder of this page, or start the run on the command line",
        "请下载到本页面的目录中，或在命令行启动训练",
    ),
    (r"stop it first", "请先停止它"),
    (r"choose it again", "请重新选择"),
    (r"name smaller files", "请选择更小的文件"),
    (r"(?P<suffixes>(?:\.[a-z.]+ ?)+)", "支持：{suffixes}"),
)
_PROBLEM_PATTERNS = [(re.compile(pattern, re.DOTALL), text) for pattern, text in _PROBLEMS]
_FIX_PATTERNS = [(re.compile(pattern, re.DOTALL), text) for pattern, text in _FIXES]


@dataclass(frozen=True)
class ProblemText:
    """`original`: the English text, where the sentence does not hold all of it."""

    what: str
    fix: str = ""
    original: str = ""


def problem_text(key: str, what: str, fix: str, lang: str, page: str = "") -> ProblemText:
    """One problem in a language; `key` is the key it is about, or empty; `page`: whose field it is. Addresses in
    it are shown without secrets."""
    what, fix = public(what), public(fix)
    is_help = key in KEYS and fix == KEYS[key].help
    if is_help:  # as the page's own field has it
        fix = help_of(key, lang, page)
    if lang != "zh":
        return ProblemText(what.removeprefix(f"{key} ") if key else what, fix)
    what_zh = _match(_PROBLEM_PATTERNS, what)
    label = f"{label_of(key, lang, page)}：" if key in KEYS else ""
    if what_zh is None:
        english = f"{what} ({fix})" if fix else what
        return ProblemText(f"{label}此项有误" if label else "操作未能完成", "", english)
    return ProblemText(label + what_zh, fix if is_help else _match(_FIX_PATTERNS, fix) or "")


def _match(patterns: list[tuple[re.Pattern[str], str]], text: str) -> str | None:
    for pattern, chinese in patterns:
        if match := pattern.fullmatch(text):
            return chinese.format(**{name: value or "" for name, value in match.groupdict().items()})
    return None
