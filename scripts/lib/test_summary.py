"""Sums up a ctest JUnit report: why tests were skipped, and "N passed, N failed, N skipped" as
the last line.

A test is one of ctest's. Of one that ran in part, each case that it skipped counts as skipped
too; one that skipped all its cases has not passed.

A second report is that of the failed ones, run again by themselves: those that passed there are
named as unsteady.
"""

import collections
import os
import re
import sys
import xml.etree.ElementTree as ElementTree


#: As GoogleTest and unittest print them; in a Python string's quotes.
SKIPPED = re.compile(r"""Skipped\n(.+)|^(?:.*\.\.\. )?skipped (["'])(.+)\2$""", re.MULTILINE)
RAN = re.compile(r"^\[       OK \]|^(?:.*\.\.\. )?ok$", re.MULTILINE)


def reasons_in(output: str) -> list[str]:
    return [(found[1] or found[3]).strip() for found in SKIPPED.finditer(output)]


def cases_in(path: str) -> list[ElementTree.Element]:
    return list(ElementTree.parse(path).getroot().iter("testcase")) if os.path.exists(path) else []


def main(path: str, again: str | None = None) -> int:
    cases = cases_in(path)
    steadied = {case.get("name") for case in cases_in(again) if case.get("status") == "run"} if again else set()
    states = collections.Counter()
    reasons = collections.defaultdict(list)
    for case in cases:
        status = case.get("status")
        output = case.findtext("system-out") or ""
        skips = reasons_in(output)
        was_skipped = status in ("notrun", "disabled") and case.find("skipped") is not None
        if was_skipped or (status == "run" and skips and not RAN.search(output)):
            states["skipped"] += 1
            said = re.search(r"(.+)", output)
            reasons[skips[0] if skips else said[1].strip() if said else "no reason given"].append(case.get("name"))
        elif status == "run":
            states["passed"] += 1
            states["skipped"] += len(skips)
            for reason in skips:
                reasons[reason].append(f"a case of {case.get('name')}")
        elif case.get("name") in steadied:
            states["passed"] += 1
            print(f"  unsteady: {case.get('name')} failed beside the others and passed by itself")
        else:
            states["failed"] += 1
            print(f"  failed: {case.get('name')}")
    for reason, names in sorted(reasons.items()):
        print(f"  skipped {len(names)}: {reason}")
        for name in names:
            print(f"      {name}")
    slowest = sorted(cases, key=lambda case: -float(case.get("time", 0)))[:12]
    print("  slowest: " + ", ".join(f"{case.get('name')} {float(case.get('time')):.1f} s" for case in slowest))
    print(f"{states['passed']} passed, {states['failed']} failed, {states['skipped']} skipped")
    return 1 if states["failed"] or not states["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
