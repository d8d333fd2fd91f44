"""A report as a Markdown page."""

from hf_freeze.lab.report.findings import answer, findings
from hf_freeze.lab.report.pictures import pictures_of
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.table import table_cells
from hf_freeze.lab.report.wording import legend, machines, method, one_head_cells, pair_cells, signatures
from hf_freeze.publish.markdown import escape, markdown_table


def markdown(report: Report) -> str:
    lines = [f"# {report.title}", "", f"**{escape(answer(report))}**", ""]
    lines += [*markdown_table(*table_cells(report), left=2), ""]
    against = "trained share" if "share" in report.axes else "parameters"
    lines += [f"![{report.task.name} against {against} and stored size]({report.picture('report')})", ""]
    lines += [report.tested_on, ""] * bool(report.tested_on)
    lines += [f"**{note}**" for note in report.notes] + [""] * bool(report.notes)
    lines += [" ".join(line[0].upper() + line[1:] for line in legend(report)), ""]
    lines += [f"- {escape(what)}: {escape(sentence)}" for what, sentence in findings(report)] + [""]
    for picture in pictures_of(report):
        if picture.kept:
            lines += [f"## {picture.section}", "", f"![{picture.title.lower()}]({report.picture(picture.name)})", ""]
            lines += [picture.says, ""] * bool(picture.says)
        if picture.name == "heads" and (cells := one_head_cells(report)):
            headings = ["attention", "best head", f"{report.task.name} with it alone"]
            lines += [*markdown_table(headings, cells, left=1), ""]
    if report.all_pairs:
        lines += ["## Differences between all rows", "", *markdown_table(*pair_cells(report), left=2), ""]
    lines += [method(report), ""]
    if len(report.sources) > 1:
        lines += [*(f"- {source.letter}: {source.described}" for source in report.sources), ""]
    lines += [f"- Command: `{command}`" for command in report.commands] + [""] * bool(report.commands)
    lines += [f"Seeds {', '.join(map(str, report.seeds))}. " + "; ".join(f"`{s}`" for s in signatures(report)), ""]
    return "\n".join([*lines, *machines(report)]) + "\n"
