"""README, docs, the page and the picture say the same numbers: those of the table that `make audit-page` writes."""

import re
from functools import cache
from pathlib import Path

import pytest

from rpg.integrations.truncation import truncation_note

ROOT = Path(__file__).parents[2]
SEEDS = 40
SURFACES = ["docs/audit-table.md", "docs/audit.svg", "docs/audit.md"]
PEERS = ("TRL", "Liger", "verl")


@cache
def text(path):
    return (ROOT / path).read_text(encoding="utf-8")


def words(path):
    """Without line breaks and word joiners."""
    return " ".join(text(path).replace("\u2060", "").split())


@cache
def table():
    """{library: {loss: {column: cell}}}"""
    found, library, header = {}, "", []
    for line in text("docs/audit-table.md").splitlines():
        if line.startswith("## "):
            library = line[3:].split()[0]
        elif line.startswith("| "):
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if cells[0] == "loss":
                header = cells
            elif not cells[0].startswith("---"):
                found.setdefault(library, {})[cells[0]] = dict(zip(header, cells, strict=True))
    return found


def is_right(cell):
    return cell == "exact" or "e-" in cell


def right_everywhere(library):
    return [row for row in table()[library].values() if row["right"] == "✓ everywhere"]


def with_kl(library):
    return [row for row in table()[library].values() if not row["ascends"].startswith("no KL")]


def right_off_policy(library):
    return [row for row in with_kl(library) if is_right(row["three policies, fixed"])]


def test_one_count_of_seeds():
    for path in SURFACES:
        assert re.findall(r"median of (\d+) seeds", words(path)) == [str(SEEDS)], path
    assert "<dd>40 (0 to 39)</dd>" in text("docs/audit.html")
    assert f"medians of {SEEDS} random problems" in words("docs/audit.md")
    commands = re.findall(
        r"^(?:\t.*|\$ )?rpg audit .*", text("Makefile") + text("README.md") + text("docs/audit.md"), re.M
    )
    printed = [line for line in commands if "grpo grpo-corrected rpg-reinforce-urkl" in line]
    assert len(printed) == 2
    assert all(f"--seeds {SEEDS}" in line for line in printed)
    assert f"audit --peers --seeds {SEEDS} --html" in text("Makefile")


@pytest.mark.parametrize("loss", ["grpo", "grpo-corrected", "rpg-reinforce-urkl"])
def test_the_printed_example_is_of_the_same_run(loss):
    row = table()["rpg"][loss]
    variable = [row[f"{s}, variable"] for s in ("on-policy", "ref=old", "three policies")]
    worst = max(variable, key=lambda cell: 0 if is_right(cell) else float(cell.split()[0]))
    cells = [row["right"], row["ascends"], row["three policies, fixed"], worst]
    cells += [row[title] for title in ("KL term", "in the box", "KL noise", "top-p 0.9")]
    printed = [" ".join(line.split()) for line in text("docs/audit.md").splitlines()]
    assert " ".join([loss, *cells]) in printed


@pytest.mark.parametrize("library", ["rpg", *PEERS])
def test_what_is_right_is_counted_once(library):
    everywhere, off_policy = len(right_everywhere(library)), len(right_off_policy(library))
    total, kl = len(table()[library]), len(with_kl(library))
    title = re.search(rf"^## ({library} [\d.]+.*)$", text("docs/audit-table.md"), re.M)[1]
    card = re.search(rf"<h3>{re.escape(title)}</h3>(.*?)</li>", text("docs/audit.html"))[1].replace("\u2060", "")
    assert f"<strong>{everywhere} <small>of {total}</small></strong>right in every setting" in card
    assert f"{off_policy} of {kl} with a KL are right off-policy" in card
    number = title.removesuffix(" (float32)")
    lane = text("docs/audit.svg").split(f">{number}<")[1]
    assert re.search(r">(\d+ of \d+) right<", lane)[1] == f"{off_policy} of {kl}"


def test_the_counts_in_the_text():
    everywhere, off_policy = ([len(f(peer)) for peer in PEERS] for f in (right_everywhere, right_off_policy))
    totals, kls = ([len(f(peer)) for peer in PEERS] for f in (table().__getitem__, with_kl))
    page = words("docs/audit.md")
    assert f"Of TRL's {totals[0]} losses {everywhere[0]} are right in every setting" in page
    assert f"of Liger's {totals[1]} it is {everywhere[1]}, of verl's {totals[2]} it is {everywhere[2]}" in page
    three = [f"{right} of {total}" for right, total in zip(off_policy, kls, strict=True)]
    assert f"right off-policy for {three[0]}, {three[1]} and {three[2]}." in page


@pytest.mark.parametrize(
    ("row", "library", "loss"),
    [
        ("k2 without a weight", "verl", "vanilla + mse"),
        ("k3 without a weight", "verl", "vanilla + low_var_kl"),
        ("k1 without a weight", "verl", "vanilla + kl"),
        ("k3 times the *sequence* ratio", "TRL", "gspo"),
        ("every RPG preset", "rpg", "rpg-urkl"),
    ],
)
def test_the_table_of_kl_terms(row, library, loss):
    line = next(line for line in text("docs/audit.md").splitlines() if line.startswith(f"| {row}"))
    assert line.split("|")[-2].strip() == table()[library][loss]["KL term"]


def test_what_top_p_costs_is_one_number_everywhere():
    """``tests/audit/test_audit.py`` measures them; the rows of TRL's and verl's exact losses have them too."""
    row = table()["TRL"]["dapo"]
    whole, engine = [row[f"top-p {p}"] for p in ("0.95", "0.9", "0.7")], row["engine's old 0.9"]
    assert whole == ["3.1 %", "6.4 %", "20 %"]
    assert engine == "9.3 %"
    page = words("docs/audit.md")
    assert f"computes old again | {', '.join(whole)} |" in page
    assert "its asynchronous trainer | 4.0 %, 9.3 %, 29 % |" in page
    assert f"is off by {whole[0]} at top-p 0.95, {whole[1]} at 0.9 and {whole[2]} at 0.7" in page
    training = words("docs/training.md")
    assert "its error is 4.0 % at top-p 0.95, 9.3 % at 0.9 and 29 % at 0.7" in training
    assert f"it is {whole[0]}, {whole[1]} and {whole[2]}" in training
    short = f"{whole[0]} off at top-p 0.95, {whole[1]} at 0.9"
    for said in (words("docs/trl.md"), words("docs/verl.md"), truncation_note("top_p=0.9")):
        assert short in said


def test_the_page_and_the_table_name_the_same_mistakes():
    names = {name for rows in table().values() for row in rows.values() for name in row["named"].split("; ") if name}
    assert {"each response is divided by its own length", "the importance weight w is missing on the reward"} <= names
    section = text("docs/audit.html").split('id="names"')[1].split("</section>")[0]
    assert {name.replace("&#x27;", "'") for name in re.findall(r"<b>(.*?)</b>", section)} == names
